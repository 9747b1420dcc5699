//! A key-value store over RDMA: a server and two clients, on a network in memory.
//!
//!     cargo run -p xwarp-verbs --no-default-features --features sim --example kv
//!
//! `docs/guide/key-value-store.md` explains it.

mod client;
mod server;
mod slot;

use std::{error::Error, net::SocketAddr, thread};

use xwarp_verbs::{
    Device, DeviceOptions,
    cm::ListenOptions,
    sim::{self, WireConfig},
};

fn main() -> Result<(), Box<dyn Error>> {
    let (a, b) = sim::pair(WireConfig::default(), 1500)?;
    let device = Device::over(Box::new(a), DeviceOptions::default())?;
    let peer = Device::over(Box::new(b), DeviceOptions::default())?;
    let address = SocketAddr::from((sim::ipv4(1), 6380));
    let listener = device.listen(address, ListenOptions::default())?;
    thread::scope(|scope| {
        let serving = scope.spawn(|| server::serve(&device, &listener, 2).map_err(|e| e.to_string()));
        let writer = client::Store::connect(&peer, address)?;
        let reader = client::Store::connect(&peer, address)?;
        writer.put(b"capital of France", b"Paris")?;
        let value = reader.get(b"capital of France")?.ok_or("nothing was stored")?;
        println!("the other client reads: {}", String::from_utf8(value)?);
        writer.close()?;
        reader.close()?;
        serving.join().map_err(|_| "the server panicked")??;
        Ok(())
    })
}
