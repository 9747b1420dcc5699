//! Pages of registered memory that are gone: unmapped, protected, or behind the end of their file. An adapter pins the pages, so its
//! programs may free memory before they deregister it. Here the engine's access faults, and a handler of SIGSEGV and SIGBUS lets the
//! access return an error ([`fault_landing`]). All other faults are those of the program, and go to its own handler.
//!
//! The handler is installed with the first registration. A program that installs its own later replaces it; the calls that
//! lead to accesses (registrations, queue pairs, connections) check for that, and then put another of our handlers in front. Each of
//! these has the action that it has replaced, so that a handler of the program that calls the one which it has replaced ends
//! there and not in a circle.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    mem, ptr,
    sync::{Mutex, OnceLock},
};

use xwarp_verbs::fault_landing;

use crate::{library, wait::lock};

/// Handlers that the program may have put between ours.
const HANDLERS: usize = 8;
const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The actions that our handlers have replaced, by signal.
static REPLACED: [[OnceLock<libc::sigaction>; HANDLERS]; 2] =
    [const { [const { OnceLock::new() }; HANDLERS] }; 2];

/// Our handlers.
const OURS: [Handler; HANDLERS] =
    [handle::<0>, handle::<1>, handle::<2>, handle::<3>, handle::<4>, handle::<5>, handle::<6>, handle::<7>];

/// Makes sure that the faults of registered memory come to us.
pub fn catch() {
    static ESTABLISHING: Mutex<bool> = Mutex::new(false);
    let mut pinned = lock(&ESTABLISHING);
    if !mem::replace(&mut *pinned, true) {
        // The handler is used as long as the process lives.
        library::stay_loaded();
    }
    for (signal, replaced) in SIGNALS.into_iter().zip(&REPLACED) {
        establish(signal, replaced);
    }
}

fn establish(signal: c_int, replaced: &[OnceLock<libc::sigaction>; HANDLERS]) {
    let Some(current) = action(signal) else { return };
    if OURS.iter().any(|ours| *ours as usize == current.sa_sigaction) {
        return;
    }
    let is_current =
        |slot: &OnceLock<libc::sigaction>| slot.get_or_init(|| current).sa_sigaction == current.sa_sigaction;
    // A program that has installed more different handlers than there are of ours keeps the last one for itself.
    let Some(number) = replaced.iter().position(is_current) else { return };
    let Some(ours) = OURS.get(number) else { return };
    // Everything that the kernel does for the program's handler it does for ours: the stack, and the signals that it blocks.
    let mut new = current;
    new.sa_sigaction = *ours as usize;
    let kept = if is_handler(&current) {
        current.sa_flags & (libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART)
    } else {
        // SAFETY: an empty set is all zero.
        new.sa_mask = unsafe { mem::zeroed() };
        libc::SA_ONSTACK
    };
    new.sa_flags = libc::SA_SIGINFO | kept;
    set_action(signal, &new);
}

fn is_handler(action: &libc::sigaction) -> bool {
    action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN
}

fn action(signal: c_int) -> Option<libc::sigaction> {
    // SAFETY: plain data, which the call fills.
    unsafe {
        let mut action = mem::zeroed();
        (libc::sigaction(signal, ptr::null(), &raw mut action) == 0).then_some(action)
    }
}

fn set_action(signal: c_int, action: &libc::sigaction) {
    // SAFETY: the action has one of our handlers, or was one of the program's or the default before.
    let _ = unsafe { libc::sigaction(signal, action, ptr::null_mut()) };
}

/// Handles a signal by the handler that has replaced the action `NUMBER`.
extern "C" fn handle<const NUMBER: usize>(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes both, for this call.
    let (code, context_of_thread) = unsafe { ((*info).si_code, &mut *context.cast::<libc::ucontext_t>()) };
    let of_processor = code > 0;
    let at = instruction(context_of_thread);
    if of_processor && let Some(landing) = fault_landing(*at as usize) {
        *at = landing as _;
        return;
    }
    let signals = SIGNALS.iter().zip(&REPLACED);
    let mut slots = signals.filter(|(of, _)| **of == signal).filter_map(|(_, slots)| slots[NUMBER].get());
    let Some(before) = slots.next() else { return };
    if !is_handler(before) {
        if before.sa_sigaction == libc::SIG_DFL || of_processor {
            end_by(signal, of_processor);
        }
        return;
    }
    if before.sa_flags & libc::SA_RESETHAND != 0 {
        set_default(signal);
    }
    if before.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: the program has installed this function as a handler of this form.
        let handler = unsafe { mem::transmute::<usize, Handler>(before.sa_sigaction) };
        handler(signal, info, context);
    } else {
        // SAFETY: as above.
        let handler = unsafe { mem::transmute::<usize, extern "C" fn(c_int)>(before.sa_sigaction) };
        handler(signal);
    }
}

/// The address of the instruction at which a thread was interrupted.
#[cfg(target_arch = "x86_64")]
fn instruction(context: &mut libc::ucontext_t) -> &mut i64 {
    &mut context.uc_mcontext.gregs[libc::REG_RIP as usize]
}

#[cfg(target_arch = "aarch64")]
fn instruction(context: &mut libc::ucontext_t) -> &mut u64 {
    &mut context.uc_mcontext.pc
}

fn set_default(signal: c_int) {
    if let Some(mut default) = action(signal) {
        default.sa_sigaction = libc::SIG_DFL;
        default.sa_flags = 0;
        set_action(signal, &default);
    }
}

/// Lets the process end as without a handler: by the instruction, which is executed again, or by the signal, sent again.
fn end_by(signal: c_int, of_processor: bool) {
    set_default(signal);
    if !of_processor {
        // SAFETY: sends a signal to this thread, which gets it when the handler returns.
        let _ = unsafe { libc::raise(signal) };
    }
}
