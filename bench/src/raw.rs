//! The raw reference: frames over AF_XDP with the minimum that every transport needs. Each payload is copied out of and
//! into the application's memory, every fourth frame is acknowledged by a frame, and a window limits the frames in
//! flight. There is no retransmission, congestion control, checksum, CRC or framing, so its figures bound those of any
//! transport over the same interface.
//!
//! It uses the driver of xwarp, whose share of the cost is part of the figures. Frames have the headers of one
//! TCP connection, because the steering program redirects only those.
//!
//! | file | owns |
//! |---|---|
//! | `frame` | the header of a frame, and the kinds of frames |
//! | `end` | the interface: sending, receiving, waiting |
//! | `meet` | the start and the end of a row, and of the server |
//! | `bulk`, `pingpong` | the rows |

mod bulk;
mod end;
mod frame;
mod meet;
mod pingpong;

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use xwarp_driver::{DriverConfig, Interface};

use self::meet::{Client, Listening};
use crate::{
    baseline::{Kind, resolve},
    options::RawArgs,
    order::{Order, Task},
    report::{Info, Report, Row, TestInfo},
    rnic::interface_name,
};

/// Runs `raw_bw` or `raw_lat`, as the server or the client.
pub fn run(kind: Kind, args: &RawArgs) -> Result<()> {
    if let Some(cpu) = args.output.pin {
        crate::cpu::pin(cpu)?;
    }
    let name = interface_name(args.device.as_deref())?;
    let config = DriverConfig { mode: args.mode.preference(), ..DriverConfig::default() };
    let interface = Interface::open(&name, &config).with_context(|| format!("cannot open {name}"))?;
    match &args.meet.server {
        None => serve(interface, args),
        Some(server) => measure(kind, interface, args, resolve(server, &args.meet)?),
    }
}

fn measure(kind: Kind, interface: Interface, args: &RawArgs, server: SocketAddr) -> Result<()> {
    let (title, default_size) = match kind {
        Kind::Bandwidth => ("Raw AF_XDP BW Test", 65536),
        Kind::Latency => ("Raw AF_XDP Latency Test", 2),
    };
    let polling = !args.events;
    let test_info = TestInfo::Baseline { test: title.replace(' ', "_"), transport: "raw AF_XDP" };
    let attributes = interface.attributes();
    let info = Info::new(title, test_info)
        .line("Transport type", "raw AF_XDP")
        .line("Receive", if polling { "polling" } else { "sleeping" })
        .line("Device", attributes.name.clone())
        .line("XDP mode", attributes.mode.to_string())
        .line("Mtu", format!("{}[B]", attributes.path_mtu))
        .line("Window", format!("{} frames", args.window))
        .line("Server", server.to_string());
    let mut report = Report::begin(&args.output, info);
    let mut client = Client::connect(interface, server, polling)?;
    for bytes in args.amount.sizes(default_size) {
        let task = if kind == Kind::Bandwidth { Task::Bulk } else { Task::Echo };
        let end = client.begin(Order { task, polling, bytes })?;
        let row = match kind {
            Kind::Bandwidth => {
                anyhow::ensure!(bytes > 0, "a message of raw_bw has at least one byte");
                let transfer = bulk::send(end, bytes, args.amount.amount(), args.window)?;
                let receipt = client.finish()?;
                let row = transfer.row(receipt);
                let lost = transfer.sent().saturating_sub(receipt.taken);
                if lost > 0 {
                    report.note(&format!("{lost} bytes were lost; they do not count"));
                }
                Row::Bandwidth(row)
            }
            Kind::Latency => {
                let row = pingpong::ask(end, bytes, args.amount.amount())?;
                client.finish()?;
                row
            }
        };
        report.row(row);
    }
    client.end()?;
    report.end(serde_json::Map::new())
}

fn serve(interface: Interface, args: &RawArgs) -> Result<()> {
    let port = args.meet.port;
    let listening = Listening::new(interface, args.meet.source, port)?;
    println!("Waiting for a client on port {port} (raw AF_XDP)");
    let (mut server, mut order) = listening.accept()?;
    loop {
        let receipt = match order.task {
            Task::Bulk => bulk::receive(server.end(), order.bytes)?,
            Task::Echo => pingpong::answer(server.end(), order.bytes)?,
            Task::End => return Ok(()),
        };
        order = server.next(receipt)?;
    }
}
