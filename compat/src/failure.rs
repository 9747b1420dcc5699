//! Errors of verbs as the numbers that C programs expect, and the three forms in which functions return them.

use std::{collections::BTreeSet, ffi::c_int, fmt::Display, sync::Mutex};

use nix::errno::Errno;
use xwarp_verbs::{
    CloseReason, DeviceFailed, PostError, ResourceError,
    cm::{CmError, EngineError},
    interface::RouteError,
};

use crate::{
    boundary::{Handle, Object},
    wait::lock,
};

/// Number of different explanations after which a process prints no others.
const MAX_EXPLANATIONS: usize = 32;

/// Prints the reason of an error for which a number says too little, on standard error and once in a process.
pub fn explain(reason: &dyn Display) {
    static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let line = reason.to_string();
    let mut printed = lock(&PRINTED);
    if printed.len() < MAX_EXPLANATIONS && !printed.contains(&line) {
        say!("{line}");
        printed.insert(line);
    }
}

/// The error number of a verb that creates, changes or destroys an object.
pub fn resource(error: ResourceError) -> Errno {
    match error {
        ResourceError::TooMany { .. } => Errno::ENOMEM,
        ResourceError::InUse(..) => Errno::EBUSY,
        ResourceError::DeviceFailed => Errno::EIO,
        _ => Errno::EINVAL,
    }
}

/// The error number of a post.
pub fn post(error: PostError) -> Errno {
    match error {
        PostError::QueueFull(_) => Errno::ENOMEM,
        PostError::NoExtensions => Errno::EOPNOTSUPP,
        // Programs wait for its arrival, some without a look at the error.
        PostError::NoSendImmediate => {
            explain(
                &"a Send with immediate data and a payload is refused: the peer does not have this extension of xwarp's (docs/compat.md)",
            );
            Errno::EOPNOTSUPP
        }
        PostError::DeviceFailed => Errno::EIO,
        _ => Errno::EINVAL,
    }
}

/// The error number of a call of the connection manager.
pub fn cm(error: &CmError) -> Errno {
    // An error with words of its own, not only a number of the kernel: another socket has the port, xwarpd refuses.
    if let CmError::Bind { source, .. } | CmError::System(source) = error
        && source.get_ref().is_some_and(|words| !words.is::<DeviceFailed>())
    {
        explain(source);
    }
    match error {
        CmError::Bind { source, .. } | CmError::System(source) => io(source),
        CmError::Listen(_) | CmError::Engine(EngineError::Connect(_)) => Errno::EADDRINUSE,
        CmError::Engine(EngineError::UnknownRequest(_)) => Errno::ECONNRESET,
        CmError::DeviceFailed => Errno::ENODEV,
        _ => Errno::EINVAL,
    }
}

/// The error number of a device that has failed or that a child process inherited.
pub fn device(failed: &DeviceFailed) -> Errno {
    explain(failed);
    Errno::ENODEV
}

/// The error number of the operating system, or of a wait on a device that has failed.
pub fn io(error: &std::io::Error) -> Errno {
    use std::io::ErrorKind;

    if let Some(failed) = error.get_ref().and_then(|source| source.downcast_ref::<DeviceFailed>()) {
        return device(failed);
    }

    let by_kind = match error.kind() {
        ErrorKind::AddrInUse => Errno::EADDRINUSE,
        ErrorKind::AddrNotAvailable => Errno::EADDRNOTAVAIL,
        ErrorKind::PermissionDenied => Errno::EACCES,
        ErrorKind::ResourceBusy => Errno::EBUSY,
        _ => Errno::EIO,
    };
    error.raw_os_error().map_or(by_kind, Errno::from_raw)
}

/// The event status for an unreachable address. An address that cannot be used at all needs an explanation.
pub fn route(error: &RouteError) -> c_int {
    if matches!(error, RouteError::Address(_)) {
        explain(error);
    }
    -(match error {
        RouteError::Address(_) => Errno::ENETUNREACH,
        RouteError::Unreachable(_) => Errno::EHOSTUNREACH,
        RouteError::TimedOut(_) => Errno::ETIMEDOUT,
    } as c_int)
}

/// The event status for a failed connection.
pub fn closed(reason: CloseReason) -> c_int {
    -(match reason {
        CloseReason::Refused => Errno::ECONNREFUSED,
        CloseReason::Unreachable => Errno::EHOSTUNREACH,
        CloseReason::TimedOut => Errno::ETIMEDOUT,
        CloseReason::InterfaceRemoved => Errno::ENODEV,
        _ => Errno::ECONNRESET,
    } as c_int)
}

/// The result of a function of libibverbs: 0 or the error number, which is in `errno` too.
pub fn number(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            error.set();
            error as c_int
        }
    }
}

/// The result of a function of librdmacm: 0, or -1 with `errno`.
pub fn minus_one(result: Result<(), Errno>) -> c_int {
    count(result.map(|()| 0))
}

/// The result of a function that counts: the number, or -1 with `errno`.
pub fn count(result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(|error| {
        error.set();
        -1
    })
}

/// The result of a function that makes an object: a pointer, or null with `errno`.
pub fn pointer<T: Object>(result: Result<Handle<T>, Errno>) -> Handle<T> {
    result.unwrap_or_else(|error| {
        error.set();
        Handle::NULL
    })
}
