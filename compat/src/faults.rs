//! Pages of registered memory that are gone: unmapped, protected, or behind the end of their file. An adapter pins the pages, so its
//! programs may free memory before they deregister it. Here the engine's access faults, and a handler of SIGSEGV and SIGBUS lets the
//! access return an error ([`fault_landing`]). All other faults are those of the program, and go to its own handler.
//!
//! The handler is installed with the first registration. From then on, `sigaction` and `signal` of the program come here, before the
//! C library: the action that the program installs becomes that of one of our handlers, which stands before it and is never seen by the
//! program. Where the dynamic linker does not find us first (a program that has loaded us by `dlopen`), the calls that lead to
//! accesses (registrations, queue pairs, connections) check for a new action, and then put a handler before it. Each of our handlers
//! has the action that it has replaced, so that a handler of the program that calls the one which it has replaced ends there and
//! not in a circle.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    mem, ptr,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use xwarp_verbs::fault_landing;

use crate::{
    library,
    wait::{lock, without_signals},
};

/// Actions of the program that ours may replace.
const HANDLERS: usize = 8;
const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// `SA_RESTORER`: the C library's own flag, which it adds to each action.
const RESTORER: c_int = 0x0400_0000;

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The actions that the handlers of one signal have replaced.
type Replaced = [OnceLock<libc::sigaction>; HANDLERS];

static REPLACED: [Replaced; 2] = [const { [const { OnceLock::new() }; HANDLERS] }; 2];

/// Our handlers.
const OURS: [Handler; HANDLERS] =
    [handle::<0>, handle::<1>, handle::<2>, handle::<3>, handle::<4>, handle::<5>, handle::<6>, handle::<7>];

/// Whether faults come to us.
static ESTABLISHED: AtomicBool = AtomicBool::new(false);

/// Makes sure that the faults of registered memory come to us.
pub fn catch() {
    if !ESTABLISHED.swap(true, Ordering::SeqCst) {
        // The handler is used as long as the process lives.
        library::stay_loaded();
    }
    for (signal, replaced) in SIGNALS.into_iter().zip(&REPLACED) {
        change(|| {
            if let Some(current) = action(signal) {
                set_action(signal, &put_before(replaced, current));
            }
        });
    }
}

/// Changes actions by `f`, one thread at a time. No handler of the program runs in this thread meanwhile, because it may call
/// [`sigaction`].
fn change<T>(f: impl FnOnce() -> T) -> T {
    static CHANGING: Mutex<()> = Mutex::new(());
    without_signals(|| {
        let _changing = lock(&CHANGING);
        f()
    })
}

/// The actions that were replaced for `signal`, if faults come to us by it.
fn replaced_for(signal: c_int) -> Option<&'static Replaced> {
    let index = SIGNALS.iter().position(|caught| *caught == signal)?;
    REPLACED.get(index).filter(|_| ESTABLISHED.load(Ordering::SeqCst))
}

/// The number of our handler in an action.
fn number_of(action: &libc::sigaction) -> Option<usize> {
    OURS.iter().position(|ours| *ours as usize == action.sa_sigaction)
}

/// The action with one of our handlers that replaces `action`; `action` itself if it has one already, or if the program has installed more
/// different actions than there are handlers.
fn put_before(replaced: &Replaced, action: libc::sigaction) -> libc::sigaction {
    if number_of(&action).is_some() {
        return action;
    }
    let mut slots = replaced.iter().zip(OURS);
    let Some((_, ours)) = slots.find(|(slot, _)| is_same(slot.get_or_init(|| action), &action)) else {
        return action;
    };
    // Everything that the kernel does for the program's handler it does for ours: the stack, and the signals that it blocks.
    let mut new = action;
    new.sa_sigaction = ours as usize;
    let kept = if is_handler(&action) {
        action.sa_flags & (libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART)
    } else {
        // SAFETY: an empty set is all zero.
        new.sa_mask = unsafe { mem::zeroed() };
        libc::SA_ONSTACK
    };
    new.sa_flags = libc::SA_SIGINFO | kept;
    new
}

fn is_same(one: &libc::sigaction, other: &libc::sigaction) -> bool {
    /// The kernel's 64 signals of a set. The C library's sets have room for 1024; the rest of one that it reads from the kernel is what
    /// was on its stack.
    fn set(action: &libc::sigaction) -> u64 {
        // SAFETY: a set consists of integers only, and is longer and as aligned as this one.
        unsafe { (&raw const action.sa_mask).cast::<u64>().read() }
    }
    let flags = |action: &libc::sigaction| action.sa_flags & !RESTORER;
    one.sa_sigaction == other.sa_sigaction && flags(one) == flags(other) && set(one) == set(other)
}

/// `sigaction` of the program: see the module's text. All other signals, and all calls before the first registration, are the C library's.
pub extern "C" fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    let Some(replaced) = replaced_for(signal) else { return set_by_c(signal, new, old) };
    change(|| {
        let before = action(signal).map(|current| {
            let shown = number_of(&current).and_then(|number| replaced.get(number)?.get());
            *shown.unwrap_or(&current)
        });
        // SAFETY: the program passes an action or a null pointer.
        if let Some(new) = unsafe { new.as_ref() } {
            set_action(signal, &put_before(replaced, *new));
        }
        // SAFETY: the program passes room for an action or a null pointer.
        if let (Some(before), Some(old)) = (before, unsafe { old.as_mut() }) {
            *old = before;
        }
        0
    })
}

/// `signal` of the program, by [`sigaction`]: the handler stays, and system calls are restarted after it.
pub extern "C" fn signal(number: c_int, handler: libc::sighandler_t) -> libc::sighandler_t {
    if replaced_for(number).is_none() || handler == libc::SIG_ERR {
        let Some(of_c) = library::next(c"signal") else { return libc::SIG_ERR };
        return of_c.call([number as usize, handler, 0, 0, 0, 0]) as libc::sighandler_t;
    }
    // SAFETY: plain data; a set without signals is all zero.
    let (mut new, mut old) = unsafe { mem::zeroed::<(libc::sigaction, libc::sigaction)>() };
    (new.sa_sigaction, new.sa_flags) = (handler, libc::SA_RESTART);
    // SAFETY: changes the set only.
    unsafe { libc::sigaddset(&raw mut new.sa_mask, number) };
    sigaction(number, &raw const new, &raw mut old);
    old.sa_sigaction
}

/// `sigaction` of the C library, or of another library before it.
fn set_by_c(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    static OF_C: OnceLock<Option<library::Function>> = OnceLock::new();
    let Some(of_c) = *OF_C.get_or_init(|| library::next(c"sigaction")) else { return -1 };
    of_c.call([signal as usize, new.addr(), old.addr(), 0, 0, 0]) as c_int
}

fn is_handler(action: &libc::sigaction) -> bool {
    action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN
}

fn action(signal: c_int) -> Option<libc::sigaction> {
    // SAFETY: plain data, which the call fills.
    let mut action = unsafe { mem::zeroed() };
    (set_by_c(signal, ptr::null(), &raw mut action) == 0).then_some(action)
}

/// Installs an action: with one of our handlers, or one that the program has installed, or the default.
fn set_action(signal: c_int, action: &libc::sigaction) {
    let _ = set_by_c(signal, action, ptr::null_mut());
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
        catch();
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
