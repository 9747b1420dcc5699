//! Compiles the programs with clang and generates their Rust skeletons.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

const PROGRAMS: [&str; 3] = ["steer", "switch", "relay"];

fn main() {
    println!("cargo:rerun-if-changed=src/bpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo tells build scripts OUT_DIR"));
    for program in PROGRAMS {
        let source = format!("src/bpf/{program}.bpf.c");
        let skeleton = out.join(format!("{program}.skel.rs"));
        if let Err(error) =
            SkeletonBuilder::new().source(source).clang_args(clang_args()).build_and_generate(&skeleton)
        {
            eprintln!("{error:?}");
            eprintln!(
                "the XDP programs need clang and the kernel's headers (Debian: apt-get install clang linux-libc-dev)"
            );
            std::process::exit(1);
        }
    }
}

/// Debian keeps `asm/types.h` in a directory that clang does not search for the target bpf.
fn clang_args() -> Vec<OsString> {
    let mut args: Vec<OsString> = ["-Wall", "-Wextra", "-Werror", "-mcpu=v3"].map(OsString::from).into();
    if let Ok(arch) = env::var("CARGO_CFG_TARGET_ARCH") {
        let multiarch = PathBuf::from(format!("/usr/include/{arch}-linux-gnu"));
        if multiarch.is_dir() {
            args.push("-idirafter".into());
            args.push(multiarch.into());
        }
    }
    args
}
