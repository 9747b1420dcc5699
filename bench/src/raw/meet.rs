//! The protocol between the two ends of the raw reference: an order begins each row, a receipt ends it, and one order
//! ends the server. Each is repeated until it is answered.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use xwarp_driver::{Interface, PortReservation, reserve_port};
use xwarp_tcp::{
    link::{Link as _, Pieces, RxFrame, Steer, rx_pieces},
    wire::{Flow, Inbound, Path, Segment, parse},
};

use super::{
    end::{End, Wait},
    frame::{Head, Kind},
    wire::{Wire, sleep},
};
use crate::{
    order::{Order, Receipt},
    rnic::CONNECT_LIMIT,
};

/// Repetitions of the last order: the server that carries it out ends and answers no more.
const LAST_ORDERS: u32 = 3;

/// The client, connected to its server.
pub(super) struct Client<W> {
    end: End<W>,
    /// Number of the current row.
    row: u32,
    _port: PortReservation,
}

impl<W: Wire> Client<W> {
    /// Finds the way to `server`. `open` makes the wire out of the interface, which has found it.
    pub(super) fn connect(
        mut interface: Interface,
        server: SocketAddr,
        polling: bool,
        open: impl FnOnce(Interface, &Path) -> Result<W>,
    ) -> Result<Self> {
        let resolver = interface.resolver()?;
        let local = resolver.route(server.ip(), None)?.source;
        let port = reserve_port(Some(local), None, interface.attributes().index)?;
        let flow = Flow { local: SocketAddr::new(local, port.port()), remote: server };
        let path = resolver.resolve(flow, CONNECT_LIMIT)?;
        interface.steer(Steer::Flow(flow))?;
        Ok(Self { end: End::new(open(interface, &path)?, &path, polling), row: 0, _port: port })
    }

    /// Gives the order of a row and waits until the server has accepted it.
    pub(super) fn begin(&mut self, order: Order) -> Result<&mut End<W>> {
        self.row += 1;
        let order = order.emit();
        ask(&mut self.end, Kind::Order, Kind::Accepted, self.row, &order).context("the server's answer")?;
        Ok(&mut self.end)
    }

    /// Ends a row and returns the server's receipt.
    pub(super) fn finish(&mut self) -> Result<Receipt> {
        let answer = ask(&mut self.end, Kind::Finish, Kind::Done, self.row, &[]).context("the receipt")?;
        Ok(Receipt::parse(answer.first_chunk().copied().context("a short receipt")?))
    }

    /// Ends the server.
    pub(super) fn end(&mut self) -> Result<()> {
        let order = Order { task: crate::order::Task::End, polling: false, bytes: 0 }.emit();
        self.row += 1;
        for _ in 0..LAST_ORDERS {
            self.end.send_checked(Kind::Order, self.row, &order)?;
            loop {
                let mut accepted = false;
                self.end
                    .receive(|head, _| accepted |= head.kind == Kind::Accepted && head.number == self.row);
                if accepted {
                    return Ok(());
                }
                if self.end.wait()? == Wait::Silent {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Sends `question` until `answer` to the same row arrives, and returns its payload.
fn ask<W: Wire>(end: &mut End<W>, question: Kind, answer: Kind, row: u32, payload: &[u8]) -> Result<Vec<u8>> {
    end.send_checked(question, row, payload)?;
    loop {
        let mut found = None;
        end.receive(|head, payload| {
            if (head.kind, head.number) == (answer, row) {
                found = Some(payload.concat());
            }
        });
        if let Some(found) = found {
            return Ok(found);
        }
        if end.wait()? == Wait::Silent {
            end.send_checked(question, row, payload)?;
        }
    }
}

/// A server without a client.
pub(super) struct Listening {
    interface: Interface,
    port: PortReservation,
}

impl Listening {
    /// Receives the first frames of clients to `port` from now on.
    pub(super) fn new(mut interface: Interface, source: Option<IpAddr>, port: u16) -> Result<Self> {
        let reserved = reserve_port(source, Some(port), interface.attributes().index)
            .with_context(|| format!("cannot listen on port {port}"))?;
        interface.steer(Steer::Listener { addr: source, port })?;
        Ok(Self { interface, port: reserved })
    }

    /// Waits for the first order, without a limit. `open` makes the wire out of the interface, which has received it.
    pub(super) fn accept<W: Wire>(
        mut self,
        open: impl FnOnce(Interface, &Path) -> Result<W>,
    ) -> Result<(Server<W>, Order)> {
        let mut batch = Vec::new();
        loop {
            self.interface.receive(&mut batch, 1);
            let mut found = None;
            for frame in batch.drain(..) {
                found = found.or_else(|| first_order(&self.interface, &frame));
                self.interface.recycle(frame);
            }
            if let Some((segment, order)) = found {
                return self.meet(&segment, order, open);
            }
            sleep(&self.interface)?;
        }
    }

    fn meet<W: Wire>(
        mut self,
        segment: &Segment,
        order: Order,
        open: impl FnOnce(Interface, &Path) -> Result<W>,
    ) -> Result<(Server<W>, Order)> {
        let attributes = self.interface.attributes();
        // A fixed path: the client's frames show the way back.
        let path = Path {
            flow: segment.flow,
            source_mac: attributes.mac,
            next_hop: None,
            next_hop_mac: segment.source_mac,
            vlan: segment.vlan,
            mtu: attributes.path_mtu,
            queue: segment.queue,
        };
        self.interface.steer(Steer::Flow(segment.flow))?;
        let mut end = End::new(open(self.interface, &path)?, &path, order.polling);
        let row = segment.seq.value();
        end.send_checked(Kind::Accepted, row, &[])?;
        Ok((Server { end, row, receipt: Receipt::default(), _port: self.port }, order))
    }
}

/// The order in a client's first frame.
fn first_order(interface: &Interface, frame: &RxFrame) -> Option<(Segment, Order)> {
    let Ok(Inbound::Tcp(segment)) = parse(interface, frame) else { return None };
    let payload = rx_pieces(interface, frame, segment.payload_start, segment.payload_len);
    Some((segment, read_order(&payload)?))
}

fn read_order(payload: &Pieces<'_>) -> Option<Order> {
    Order::parse(payload.concat().try_into().ok()?)
}

/// The server, with its client.
pub(super) struct Server<W> {
    end: End<W>,
    /// Number of the current row.
    row: u32,
    /// Its receipt, once it is finished.
    receipt: Receipt,
    _port: PortReservation,
}

/// The client's frames that are not data, while a row runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Asked {
    /// The row's order arrived again, because its answer was lost.
    again: Option<u32>,
    /// The client has finished the row.
    finished: bool,
}

impl Asked {
    /// Notes a frame.
    pub(super) fn note(&mut self, head: Head) {
        match head.kind {
            Kind::Order => self.again = Some(head.number),
            Kind::Finish => self.finished = true,
            _ => {}
        }
    }

    /// Answers a repeated order. Returns whether the row is finished.
    pub(super) fn answer<W: Wire>(&mut self, end: &mut End<W>) -> Result<bool> {
        if let Some(row) = self.again.take() {
            end.send_checked(Kind::Accepted, row, &[])?;
        }
        Ok(self.finished)
    }
}

impl<W: Wire> Server<W> {
    /// The end, for the current row.
    pub(super) fn end(&mut self) -> &mut End<W> {
        &mut self.end
    }

    /// Gives the receipt of the current row, and waits for the order of the next one.
    pub(super) fn next(&mut self, receipt: Receipt) -> Result<Order> {
        self.receipt = receipt;
        self.end.send_checked(Kind::Done, self.row, &receipt.emit())?;
        loop {
            let (mut finished, mut order) = (false, None);
            self.end.receive(|head, payload| match head.kind {
                Kind::Order if head.number != self.row => {
                    order = read_order(&payload).map(|order| (head.number, order));
                }
                Kind::Finish => finished |= head.number == self.row,
                _ => {}
            });
            if let Some((row, order)) = order {
                self.row = row;
                self.end.set_polling(order.polling);
                self.end.send_checked(Kind::Accepted, row, &[])?;
                return Ok(order);
            }
            if finished {
                self.end.send_checked(Kind::Done, self.row, &self.receipt.emit())?;
            }
            self.end.wait()?;
        }
    }
}
