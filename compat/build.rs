//! Passes the version nodes and the SONAME of the drop-in library to the linker.

fn main() {
    let directory = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    println!("cargo::rerun-if-changed=versions.map");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={directory}/versions.map");
    // The nodes of the script are empty: the symbols name theirs.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--undefined-version");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
}
