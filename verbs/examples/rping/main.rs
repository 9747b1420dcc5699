//! `rping` of rdmacm-utils over xwarp: each end can talk to the other program. In each round the client
//! advertises a buffer with a text, the server reads it (RDMA Read) and says so, the client advertises another
//! buffer, the server writes the text back into it (RDMA Write) and says so.
//!
//!     rping INTERFACE -s [-a ADDRESS] [OPTIONS]      the server, for one client
//!     rping INTERFACE -c -a ADDRESS [OPTIONS]        the client
//!
//! `rping --help` lists the options. Needs the rights to load an XDP program.

mod arguments;
mod client;
mod peer;
mod server;

use std::{env, error::Error, process::ExitCode};

use xwarp_verbs::{Device, DeviceOptions};

use arguments::{Arguments, Role};

/// The errors of this program.
type Failure = Box<dyn Error>;

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let arguments = match Arguments::parse(&words) {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("rping: {why}\n{}", arguments::USAGE);
            return ExitCode::from(2);
        }
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("rping: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    let options = DeviceOptions {
        framing: arguments.mpa.clone().into(),
        capture: arguments.capture.clone(),
        ..DeviceOptions::default()
    };
    let device = Device::open_with(&arguments.interface, options)?;
    let result = match arguments.role {
        Role::Server => server::serve(&device, arguments),
        Role::Client => client::ping(&device, arguments),
    };
    let events = device.async_events();
    while let Some(event) = events.poll() {
        eprintln!("event: {event:?}");
    }
    result
}
