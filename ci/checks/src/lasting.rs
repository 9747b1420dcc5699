//! Programs without privileges that must outlast restarts of `xwarpd`: a server, and a client that does everything that a device can do,
//! again and again, and reports how far it has come; and [`Crowd`], some of them.

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result};
use xwarp_driver::Origin;
use xwarp_verbs::{
    Device,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
};

use crate::{
    exchange::{End, LIMIT, device},
    process::Running,
};

/// Messages of the lasting connection in each round, and of the new one.
const LASTING: usize = 20;
const NEW: usize = 5;

/// Pause between two rounds.
const PAUSE: Duration = Duration::from_millis(2);

/// Time limit of a round, while a helper may be away.
const ROUND: Duration = Duration::from_secs(60);

/// A server and clients, all behind the same helper.
#[derive(Debug)]
pub struct Crowd {
    /// The server.
    pub server: Running,
    /// Its clients.
    pub clients: Vec<Running>,
}

impl Crowd {
    /// Starts a server at `address` and its clients with a function that starts such a program, and waits until all exchange messages.
    pub fn start(address: &str, clients: usize, start: impl Fn(&[&str]) -> Result<Running>) -> Result<Self> {
        let mut server = start(&["serve", address])?;
        server.wait_for("listens", ROUND)?;
        let clients = (0..clients).map(|_| start(&["last", address])).collect::<Result<_>>()?;
        let mut crowd = Self { server, clients };
        crowd.goes_on()?;
        Ok(crowd)
    }

    /// Waits until each client has completed a round that began after this call.
    pub fn goes_on(&mut self) -> Result<()> {
        for client in &mut self.clients {
            let done = client.arrived().iter().filter_map(|line| round(line)).next_back();
            let next = done.map_or(0, |done| done + 2);
            client.wait_for_line(&format!("round {next}"), ROUND, |line| round(line) >= Some(next))?;
        }
        Ok(())
    }
}

/// The number of a round that a client reports.
fn round(line: &str) -> Option<usize> {
    line.strip_prefix("round ")?.parse().ok()
}

/// Accepts connections without end, and answers all messages.
pub fn serve(address: SocketAddr) -> Result<()> {
    let device = device(Origin::Granted)?;
    let listener = device.listen(address, ListenOptions::default())?;
    println!("listens");
    thread::scope(|scope| {
        loop {
            let mut request = listener.accept(10 * LIMIT)?;
            let device = &device;
            scope.spawn(move || -> Result<()> {
                let end = End::new(device)?;
                end.post_receive()?;
                let _connection = request.accept(&end.qp, AcceptOptions::default(), LIMIT)?;
                (0..).try_for_each(|number| end.answer(number))
            });
        }
    })
}

/// Keeps one connection and exchanges messages over it; makes another one, and listens, in each round.
pub fn last(address: SocketAddr) -> Result<()> {
    let device = device(Origin::Granted)?;
    let end = End::new(&device)?;
    let _connection = device.connect(&end.qp, address, ConnectOptions::default(), LIMIT)?;
    let ended = rounds(&device, &end, address);
    // The reason of the device's end, if the device has ended.
    if let Err(reason) = device.listen(address, ListenOptions::default()) {
        println!("{:#}", anyhow::Error::from(reason));
    }
    ended
}

fn rounds(device: &Device, end: &End, address: SocketAddr) -> Result<()> {
    let mut state = String::new();
    for round in 0.. {
        end.ask(round * LASTING..(round + 1) * LASTING).with_context(|| format!("round {round}"))?;
        once(device, address).with_context(|| format!("a new connection in round {round}"))?;
        let now = device.attributes().interface;
        let now = format!("mtu {} up {} addresses {:?}", now.mtu, now.up, now.addresses);
        if now != state {
            println!("{now}");
            state = now;
        }
        println!("round {round}");
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Everything that needs the helper: ports, routes and neighbours.
fn once(device: &Device, address: SocketAddr) -> Result<()> {
    let own = device.attributes().interface.addresses.first().copied().context("no address")?;
    let _listener = device.listen(SocketAddr::new(own, 0), ListenOptions::default())?;
    let end = End::new(device)?;
    let connection = device.connect(&end.qp, address, ConnectOptions::default(), LIMIT)?;
    end.ask(0..NEW)?;
    Ok(connection.disconnect()?)
}
