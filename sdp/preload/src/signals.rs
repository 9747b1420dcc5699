//! The program's signal handlers, as far as reads must know them: whether a call that waits in the kernel is restarted
//! after a handler, or ends with `EINTR`. The kernel is asked once for all signals, and for one after each call that may
//! have changed its handler. This is lock-free, since the calls may come from signal handlers.
//!
//! Cancellations of threads are counted here, and end sleeps.

use std::{
    mem::MaybeUninit,
    ptr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use libc::{c_int, pthread_t, sighandler_t};

use crate::{next, process::Process};

/// What a handler does to a read without time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handlers {
    /// Every handler lets it continue (`SA_RESTART`), or there is none.
    Restart,
    /// Every handler ends it.
    Interrupt,
    Mixed,
}

/// Signals by number whose handlers let a read continue, and those whose handlers end it.
static RESTARTING: AtomicU64 = AtomicU64::new(0);
static INTERRUPTING: AtomicU64 = AtomicU64::new(0);
/// The kernel was asked for all signals.
static KNOWN: AtomicBool = AtomicBool::new(false);

/// The handlers of all signals, also of those that a thread blocks.
pub fn handlers() -> Handlers {
    if !KNOWN.swap(true, Ordering::SeqCst) {
        (1..=libc::SIGRTMAX()).for_each(look);
    }
    match (RESTARTING.load(Ordering::SeqCst), INTERRUPTING.load(Ordering::SeqCst)) {
        (_, 0) => Handlers::Restart,
        (0, _) => Handlers::Interrupt,
        _ => Handlers::Mixed,
    }
}

/// The program may have changed the handler of a signal.
fn changed(signal: c_int) {
    if KNOWN.load(Ordering::SeqCst) {
        let before = crate::sys::errno();
        look(signal);
        crate::sys::set_errno(before);
    }
}

/// Asks the kernel for the handler of a signal.
fn look(signal: c_int) {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: a null action changes nothing; the action is read only if the call has stored it.
    let action = unsafe {
        if next::sigaction(signal, ptr::null(), action.as_mut_ptr()) != 0 {
            return;
        }
        action.assume_init()
    };
    let bit = 1 << (signal - 1);
    let handles = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
    let restarts = action.sa_flags & libc::SA_RESTART != 0;
    for (signals, is_one) in [(&RESTARTING, handles && restarts), (&INTERRUPTING, handles && !restarts)] {
        if is_one {
            signals.fetch_or(bit, Ordering::SeqCst);
        } else {
            signals.fetch_and(!bit, Ordering::SeqCst);
        }
    }
}

/// Cancellations of threads so far.
static CANCELS: AtomicU64 = AtomicU64::new(0);

pub fn cancels() -> u64 {
    CANCELS.load(Ordering::SeqCst)
}

/// Cancels a thread.
///
/// # Safety
/// As for `pthread_cancel` of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_cancel(thread: pthread_t) -> c_int {
    // SAFETY: the caller's promise.
    let done = unsafe { next::pthread_cancel(thread) };
    CANCELS.fetch_add(1, Ordering::SeqCst);
    if let Some(process) = Process::existing() {
        process.end_sleeps();
    }
    done
}

/// Replaces functions of the C library that set the handler of a signal.
macro_rules! replace {
    ($($name:ident($signal:ident: c_int $(, $arg:ident: $kind:ty)*) -> $result:ty = $next:ident;)*) => {$(
        #[doc = concat!("Replaces `", stringify!($name), "`.\n\n# Safety\nAs for the function of the C library.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($signal: c_int $(, $arg: $kind)*) -> $result {
            // SAFETY: the caller's promise.
            let done = unsafe { next::$next($signal $(, $arg)*) };
            changed($signal);
            done
        }
    )*};
}

replace! {
    sigaction(signal: c_int, action: *const libc::sigaction, before: *mut libc::sigaction) -> c_int = sigaction;
    __sigaction(signal: c_int, action: *const libc::sigaction, before: *mut libc::sigaction) -> c_int = sigaction;
    signal(number: c_int, handler: sighandler_t) -> sighandler_t = signal;
    bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t = signal;
    ssignal(number: c_int, handler: sighandler_t) -> sighandler_t = signal;
    sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t = sysv_signal;
    __sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t = sysv_signal;
    sigset(number: c_int, disposition: sighandler_t) -> sighandler_t = sigset;
    sigignore(number: c_int) -> c_int = sigignore;
    siginterrupt(number: c_int, flag: c_int) -> c_int = siginterrupt;
}
