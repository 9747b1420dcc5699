//! An initiator's port is one with which the peer's frames arrive at the engine of the connection.
#![cfg(feature = "sim")]
#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

mod common;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use common::connect;
use xwarp_tcp::{forward_link, link::Link};
use xwarp_verbs::{
    Device, DeviceOptions, QueuePairOptions, forward_interface,
    interface::{Flow, Interface, PortReservation, Resolver, Route, RouteError},
    sim::{self, SimInterface, WireConfig},
};

/// A queue whose NIC sends the frames of odd ports to the second queue, and all others to the first.
#[derive(Debug)]
struct Part(SimInterface, u16);

struct Ports(Arc<dyn Resolver>, u16);

impl Resolver for Ports {
    fn resolve(&self, to: SocketAddr, source: Option<IpAddr>, limit: Duration) -> Result<Route, RouteError> {
        self.0.resolve(to, source, limit)
    }

    fn arrives_here(&self, flow: &Flow) -> bool {
        flow.local.port() % 2 == self.1
    }

    fn reserve_port(&self, address: Option<IpAddr>, port: u16) -> io::Result<PortReservation> {
        self.0.reserve_port(address, port)
    }
}

impl Link for Part {
    forward_link!(0: chunk_bytes, tx_available, rx_capacity, rx_available, receive, rx_chunks, recycle, alloc,
        tx_chunks_into, submit, release, flush, steer, unsteer);
}

impl Interface for Part {
    forward_interface!(0: attributes, readiness, change, counters);

    fn resolver(&self) -> Arc<dyn Resolver> {
        Arc::new(Ports(self.0.resolver(), self.1))
    }
}

fn device(parts: Vec<SimInterface>) -> Device {
    let parts =
        parts.into_iter().zip(0..).map(|(part, number)| Box::new(Part(part, number)) as Box<dyn Interface>);
    Device::over_parts(parts.collect(), DeviceOptions::default()).unwrap()
}

#[test]
fn an_initiator_draws_a_port_for_its_engine() {
    let devices = sim::queues(WireConfig::default(), 1500, 2).unwrap().map(device);
    for port in 1..6 {
        for engine in [1, 0, 0] {
            let make = |device: &Device| {
                let made = common::queue_pair(device, QueuePairOptions::default());
                made.2.move_to_engine(engine).unwrap();
                made
            };
            let [_, end] = common::connect_with(&devices, port, make);
            let local = end.connection.local_address().unwrap().port();
            assert_eq!((end.qp.engine(), local % 2), (engine, engine), "port {local}");
        }
    }
}

/// The number of draws is bounded: the connection is made with a port of another engine, and its frames are handed over.
#[test]
fn an_initiator_that_draws_no_port_for_its_engine_connects_nevertheless() {
    let parts = sim::queues(WireConfig::default(), 1500, 1).unwrap();
    let devices = parts.map(|parts| {
        let part = Part(parts.into_iter().next().unwrap(), 7);
        Device::over(Box::new(part), DeviceOptions::default()).unwrap()
    });
    let [_peer, end] = connect(&devices, 7);
    assert!(end.connection.local_address().is_some());
    assert!(end.connection.wait_disconnected(Duration::ZERO).is_ok_and(|ended| !ended));
}
