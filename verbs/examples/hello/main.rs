//! A server and a client that exchange a text over two RNICs.
//!
//!     hello INTERFACE                 the server, on port 4791
//!     hello INTERFACE ADDRESS TEXT    the client
//!
//! Needs the rights to load an XDP program (root, or the capabilities that the error message names).

mod client;
mod server;

use std::{env, error::Error, net::SocketAddr};

use xwarp_verbs::Device;

const PORT: u16 = 4791;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [interface] => {
            let device = Device::open(interface)?;
            let address = SocketAddr::from(([0, 0, 0, 0], PORT));
            let text = server::serve(&device, address, |at| println!("listening at {at}"))?;
            println!("a client wrote: {text}");
        }
        [interface, address, text] => {
            let device = Device::open(interface)?;
            println!("{}", client::ask(&device, SocketAddr::new(address.parse()?, PORT), text)?);
        }
        _ => return Err("usage: hello INTERFACE [ADDRESS TEXT]".into()),
    }
    Ok(())
}
