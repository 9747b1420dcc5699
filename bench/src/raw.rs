//! The raw reference: frames over AF_XDP with the minimum that every transport needs. Each payload is copied out of and
//! into the application's memory, every fourth frame is acknowledged by a frame, and a window limits the frames in
//! flight. There is no retransmission, congestion control, checksum, CRC or framing, so its figures bound those of any
//! transport over the same interface.
//!
//! The same rows run over two wires (`--over`). xsk-rs and the program of libxdp are what another author would take, and share
//! nothing with xwarp: the faster of their two modes is the limit. xwarp's driver shows which part of the distance to it is the
//! driver's. Frames have the headers of one TCP connection, because the driver's steering program redirects only those. The ends
//! meet over the driver, which finds the way.
//!
//! | file | owns |
//! |---|---|
//! | `frame` | the header of a frame, and the kinds of frames |
//! | `wire`, `xsk` | the interface, through xwarp's driver and through xsk-rs |
//! | `end` | one end: its frames, and its waits |
//! | `meet` | the start and the end of a row, and of the server |
//! | `bulk`, `pingpong` | the rows |

mod bulk;
mod end;
mod frame;
mod meet;
mod pingpong;
mod wire;
mod xsk;

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail};
use xwarp_driver::{DriverConfig, Interface};
use xwarp_tcp::wire::Path;

use self::{
    meet::{Client, Listening},
    wire::{Driver, Wire},
    xsk::Xsk,
};
use crate::{
    baseline::{Kind, resolve},
    options::{ModeArg, RawArgs, WireArg},
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
    match args.over {
        WireArg::Driver => {
            run_over(kind, interface, args, |interface, path| Ok(Driver::new(interface, path.queue)))
        }
        WireArg::XskRs => {
            let generic = match args.mode {
                ModeArg::Generic => true,
                ModeArg::Copy => false,
                ModeArg::Auto | ModeArg::Zerocopy => bail!("--over xsk-rs needs --mode generic or copy"),
            };
            run_over(kind, interface, args, |interface, path| {
                drop(interface);
                Xsk::open(&name, path.queue.0.into(), path.mtu, generic)
            })
        }
    }
}

/// Runs a test over the wire that `open` makes out of the interface when the ends have met.
fn run_over<W: Wire>(
    kind: Kind,
    interface: Interface,
    args: &RawArgs,
    open: impl FnOnce(Interface, &Path) -> Result<W>,
) -> Result<()> {
    match &args.meet.server {
        None => serve(interface, args, open),
        Some(server) => measure(kind, interface, args, resolve(server, &args.meet)?, open),
    }
}

fn measure<W: Wire>(
    kind: Kind,
    interface: Interface,
    args: &RawArgs,
    server: SocketAddr,
    open: impl FnOnce(Interface, &Path) -> Result<W>,
) -> Result<()> {
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
        .line("Over", args.over.name())
        .line("Device", attributes.name.clone())
        .line("XDP mode", attributes.mode.to_string())
        .line("Mtu", format!("{}[B]", attributes.path_mtu))
        .line("Window", format!("{} frames", args.window))
        .line("Server", server.to_string());
    let mut report = Report::begin(&args.output, info);
    let mut client = Client::connect(interface, server, polling, open)?;
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

fn serve<W: Wire>(
    interface: Interface,
    args: &RawArgs,
    open: impl FnOnce(Interface, &Path) -> Result<W>,
) -> Result<()> {
    let port = args.meet.port;
    let listening = Listening::new(interface, args.meet.source, port)?;
    println!("Waiting for a client on port {port} (raw AF_XDP)");
    let (mut server, mut order) = listening.accept(open)?;
    loop {
        let receipt = match order.task {
            Task::Bulk => bulk::receive(server.end(), order.bytes)?,
            Task::Echo => pingpong::answer(server.end(), order.bytes)?,
            Task::End => return Ok(()),
        };
        order = server.next(receipt)?;
    }
}
