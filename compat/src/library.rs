//! The dynamic linker: libraries of the distribution that are loaded beside this one, and this one itself.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;

/// A library of the distribution, loaded beside this one.
pub struct Library(*mut c_void);

// SAFETY: the handle is a name, which `dlsym` takes from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// A function of six integers or pointers.
type SixArguments = extern "C" fn(usize, usize, usize, usize, usize, usize) -> isize;

/// A function of such a library.
#[derive(Clone, Copy)]
pub struct Function(SixArguments);

impl Library {
    /// Loads the file at `path`, which then calls this library wherever both have a function. `None` if there is no such library, or
    /// if it is this one.
    pub fn load(path: &CStr) -> Option<Self> {
        let own = object_of(object_of as *const c_void)?;
        // SAFETY: the file is loaded already; the call makes its symbols the first ones that other libraries find.
        unsafe { libc::dlopen(own.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_GLOBAL) };
        // SAFETY: the constructors of a library of the distribution may run at any time.
        let library = Self(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) });
        (!library.0.is_null()).then_some(library)
    }

    /// The function with this name, of at most six integers and pointers.
    pub fn function(&self, name: &CStr) -> Option<Function> {
        // SAFETY: the handle came from `dlopen` and is never closed.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        let is_own = object_of(found)?.dli_fbase == object_of(object_of as *const c_void)?.dli_fbase;
        // SAFETY: it is the function's address. The callers' contract defines its parameters; further arguments are in
        // registers that it does not read.
        (!is_own).then(|| Function(unsafe { std::mem::transmute::<*mut c_void, SixArguments>(found) }))
    }
}

impl Function {
    /// Calls the function with the arguments that a C program passed to the function of the same name.
    pub fn call(self, [first, second, third, fourth, fifth, sixth]: [usize; 6]) -> isize {
        (self.0)(first, second, third, fourth, fifth, sixth)
    }
}

/// The function with this name, of at most six integers and pointers, that programs would call without this library.
pub fn next(name: &CStr) -> Option<Function> {
    // SAFETY: asks for the address of a function.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    // SAFETY: as in `Library::function`.
    (!found.is_null()).then(|| Function(unsafe { std::mem::transmute::<*mut c_void, SixArguments>(found) }))
}

/// The loaded file that contains an address.
fn object_of(address: *const c_void) -> Option<libc::Dl_info> {
    let mut info = MaybeUninit::uninit();
    // SAFETY: `dladdr` takes any address, and fills the structure when it returns something else than 0.
    unsafe { (libc::dladdr(address, info.as_mut_ptr()) != 0).then(|| info.assume_init()) }
}

/// Keeps this library loaded until the process ends, whatever the program closes.
pub fn stay_loaded() {
    if let Some(own) = object_of(object_of as *const c_void) {
        // SAFETY: the library is loaded already, and only marked.
        unsafe { libc::dlopen(own.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    }
}
