//! rsockets: byte streams over verbs, with the code of the distribution's librdmacm.
//!
//! That code calls the connection manager and the verbs as any program does, through symbols that the dynamic linker resolves. So the
//! distribution's librdmacm is loaded beside this library when the first rsocket is opened, and finds our functions instead of its own.
//! Two of its calls do not go through symbols, and read private fields behind an `rdma_cm_id`: see [`PRIVATE_BYTES`].

use std::{
    cell::Cell,
    ffi::{CStr, CString, c_int, c_void},
    sync::OnceLock,
};

use nix::errno::Errno;

use crate::{
    boundary,
    config::config,
    failure::count,
    library::{Function, Library},
};

/// Bytes behind the public part of an identifier that rsockets read, all zero: there is no device of librdmacm's own (it then
/// asks for the sizes of all devices), and no step of a connection is outstanding.
pub const PRIVATE_BYTES: usize = 256;

/// Directories in which distributions have their libraries.
const DIRECTORIES: [&str; 4] = [MULTIARCH, "/usr/lib64", "/usr/lib", "/usr/local/lib"];
#[cfg(target_arch = "x86_64")]
const MULTIARCH: &str = "/usr/lib/x86_64-linux-gnu";
#[cfg(target_arch = "aarch64")]
const MULTIARCH: &str = "/usr/lib/aarch64-linux-gnu";

thread_local! {
    /// Whether this thread is opening an rsocket.
    static OPENS: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller is [`rsocket`]: rsockets do not expect asynchronous calls on their identifiers.
pub fn opens_rsocket() -> bool {
    OPENS.get()
}

macro_rules! rsocket_calls {
    ($($name:ident)*) => {
        /// The distribution's functions.
        struct Rsockets {
            $($name: Function,)*
            library: Library,
        }

        impl Rsockets {
            fn of(library: Library) -> Option<Self> {
                Some(Self {
                    $($name: {
                        let name = CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes());
                        library.function(name.ok()?)?
                    },)*
                    library,
                })
            }
        }

        rsocket_calls!(@ $($name)*);
    };
    // These two are written out below.
    (@ rsocket rpoll $($name:ident)*) => {
        $(
            pub extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
                call(|all| all.$name, [a, b, c, d, e, f])
            }
        )*
    };
}

rsocket_calls! {
    rsocket rpoll
    raccept rbind rclose rconnect rfcntl rgetpeername rgetsockname rgetsockopt riomap riounmap riowrite rlisten rread rreadv rrecv
    rrecvfrom rrecvmsg rselect rsend rsendmsg rsendto rsetsockopt rshutdown rwrite rwritev
}

static RSOCKETS: OnceLock<Option<Rsockets>> = OnceLock::new();

/// Loads the distribution's librdmacm.
fn load() -> Option<Rsockets> {
    let found = match &config().rsockets {
        Some(path) => of_file(path),
        None => DIRECTORIES.iter().find_map(|directory| of_file(&format!("{directory}/librdmacm.so.1"))),
    };
    if found.is_none() {
        say!("rsockets need the librdmacm.so.1 of the distribution; XWARP_RSOCKETS says where it is");
    }
    found
}

fn of_file(path: &str) -> Option<Rsockets> {
    Rsockets::of(Library::load(&CString::new(path).ok()?)?)
}

fn call(function: impl FnOnce(&Rsockets) -> Function, arguments: [usize; 6]) -> isize {
    match RSOCKETS.get_or_init(load) {
        Some(all) => function(all).call(arguments),
        None => count(Err(Errno::EOPNOTSUPP)) as isize,
    }
}

/// Calls of librdmacm since rdma-core 65, which an older one of the distribution lacks.
macro_rules! newer_calls {
    ($($name:ident)*) => {
        $(
            pub extern "C" fn $name(a: usize, b: usize, c: usize, d: usize) -> isize {
                let name = CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes());
                let all = RSOCKETS.get_or_init(load).as_ref();
                let function = all.zip(name.ok()).and_then(|(all, name)| all.library.function(name));
                match function {
                    Some(function) => function.call([a, b, c, d, 0, 0]),
                    None => count(Err(Errno::EOPNOTSUPP)) as isize,
                }
            }
        )*
    };
}

newer_calls! { repoll_create repoll_ctl repoll_wait }

pub extern "C" fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    OPENS.set(true);
    let socket = call(|all| all.rsocket, [domain as usize, kind as usize, protocol as usize, 0, 0, 0]);
    OPENS.set(false);
    socket as c_int
}

/// `poll` for rsockets and other descriptors. Programs of librdmacm's own tests call it without rsockets.
pub extern "C" fn rpoll(fds: *mut c_void, number: libc::nfds_t, limit_ms: c_int) -> c_int {
    match RSOCKETS.get() {
        Some(Some(all)) => {
            let arguments = [fds.expose_provenance(), number as usize, limit_ms as usize, 0, 0, 0];
            all.rpoll.call(arguments) as c_int
        }
        _ => boundary::poll(fds, number, limit_ms),
    }
}
