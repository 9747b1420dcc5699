//! Target: one machine of SDP with a program that uses everything and a peer that sends anything.
//!
//! An input is: the role and the sizes, then steps. A step is one byte, of which the low half says what is done. Messages of the
//! peer get the length that they have, and, unless the step says otherwise, the next sequence number and a valid
//! acknowledgement: else nearly every mutation would only end the connection.

use xwarp_sdp::{
    machine::{Action, Config, Machine, Notice},
    mapper::Packet,
    wire::{Advert, BASE_BYTES, Base, Hello, HelloAck, Message, Mode, Seq},
};

use crate::input::Input;

/// Actions that one step may cause: receives, and one message for each credit and each byte that waits.
const MAX_ACTIONS: usize = 20_000;
/// Largest piece of memory.
const MAX_PIECE: u32 = 5000;
/// Memory of the program lies at these offsets, that of the peer below.
const OWN: u64 = 1 << 40;

/// The machine and its caller's state.
struct End {
    machine: Machine,
    /// Bytes of messages.
    bytes: Vec<u8>,
    /// Numbers of the last message in each direction.
    sent: u32,
    received: u32,
    /// Reads that are to be completed.
    reads: usize,
    /// Memory of the program that is in use, by kind and identifier.
    sending: Vec<u64>,
    receiving: Vec<u64>,
    /// Bytes of messages that the peer can have received, by its largest receive.
    most_message: usize,
}

/// Runs one input.
pub fn target(data: &[u8]) {
    if let Ok(packet) = Packet::parse(data) {
        assert_eq!(Packet::parse(&packet.emit()), Ok(packet), "a message of the port mapper changed");
    }
    let mut input = Input::new(data);
    let Some(mut end) = End::open(&mut input) else { return };
    while !input.is_empty() {
        end.step(&mut input);
        end.drive();
    }
    end.machine.stream_ended();
    end.drive();
    assert!(end.machine.ended().is_some(), "the connection has not ended");
    assert!(end.receiving.is_empty(), "receives without end: {:?}", end.receiving);
}

impl End {
    fn open(input: &mut Input<'_>) -> Option<Self> {
        let role = input.u8();
        let config = Config {
            buffers: u16::from(input.u8() % 9),
            buffer_bytes: input.u16().into(),
            most_buffer_bytes: input.u16().into(),
            desired_bytes: input.u16().into(),
            send_bytes: 4000,
            receive_bytes: 4000,
            max_adverts: u16::from(input.u8() % 4),
            ird: 1,
            ord: 1,
        };
        let bufs = input.u16();
        let (max_adverts, buffer_bytes) = (u16::from(input.u8() % 8), u32::from(input.u16()));
        let base = Base { bufs, ..Base::default() };
        let mut greeting = Vec::new();
        let machine = if role & 1 == 0 {
            let hello = Hello { max_adverts, desired_bytes: 4096, buffer_bytes, ird: 4, ord: 4 };
            Message::Hello(hello).emit(base, 0, &mut greeting);
            Machine::accept(&config, &greeting).ok()?
        } else {
            let (mut machine, _) = Machine::connect(&config);
            let ack = HelloAck { max_adverts, buffer_bytes, ird: 4, ord: 4 };
            Message::HelloAck(ack).emit(base, 0, &mut greeting);
            machine.receive(&greeting, None);
            machine
        };
        let mut end = Self {
            machine,
            bytes: Vec::new(),
            sent: 0,
            received: 0,
            reads: 0,
            sending: Vec::new(),
            receiving: Vec::new(),
            most_message: usize::MAX,
        };
        end.most_message = (config.desired_bytes.max(37)) as usize;
        end.drive();
        Some(end)
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let step = input.u8();
        let machine = &mut self.machine;
        match step & 0xf {
            0 => {
                let bytes = vec![step; usize::from(input.u16() % 6000)];
                let taken = machine.write(&bytes);
                assert!(taken <= bytes.len());
            }
            1 => self.sending.push(machine.write_memory(own_memory(input))),
            2 if self.receiving.len() < 8 => self.receiving.push(machine.read_memory(own_memory(input))),
            3 => {
                let mut out = vec![0; input.u16().into()];
                let peeked = machine.peek(&mut out);
                let (n, before) = (machine.read(&mut out), machine.buffered());
                assert!(n <= out.len() && peeked >= n && machine.buffered() == before);
            }
            4 => machine.cancel_writes(),
            5 => machine.cancel_reads(),
            6 => {
                machine.write_oob(step);
            }
            7 => {
                machine.take_oob();
                machine.want_messages();
            }
            8 => {
                let mode = [Mode::Buffered, Mode::Combined, Mode::Pipelined][usize::from(step >> 4) % 3];
                let _ = (machine.change_mode(mode), machine.leave_buffered());
            }
            9 if step >> 4 > 12 => machine.shutdown(),
            9 => {
                machine.suspend(input.u16());
            }
            10 if step >> 4 > 13 => machine.abort(),
            11 if self.reads > 0 => {
                self.reads -= 1;
                machine.read_done();
            }
            _ => self.message(step, input),
        }
    }

    /// The peer has suspended communication and makes the connection again.
    fn resume(&mut self) {
        let hello = Hello { max_adverts: 2, desired_bytes: 4096, buffer_bytes: 64, ird: 4, ord: 4 };
        let mut greeting = Vec::new();
        Message::Hello(hello).emit(Base { bufs: 3, ..Base::default() }, 0, &mut greeting);
        self.machine.stream_ended();
        assert!(self.machine.resume(&greeting).is_ok());
        (self.sent, self.received) = (0, 0);
    }

    /// A message of the peer.
    fn message(&mut self, step: u8, input: &mut Input<'_>) {
        let (mid, flags, bufs) = (input.u8(), input.u8(), input.u16());
        let body = input.chunk();
        let wrong = step >> 4 == 15;
        let seq = if wrong { input.u32() } else { self.received.wrapping_add(1) };
        let ack = if wrong { input.u32() } else { self.sent };
        let invalidated = (step >> 4 == 14).then(|| input.u32());
        // Kinds that the draft knows are as likely as all others.
        let mid = if mid < 0x80 { mid % 0x10 } else { 0xfd + mid % 3 };
        let mut bytes = vec![mid, flags & 7];
        bytes.extend(bufs.to_be_bytes());
        for field in [(BASE_BYTES + body.len()) as u32, seq, ack] {
            bytes.extend(field.to_be_bytes());
        }
        bytes.extend(body);
        self.received = seq;
        self.machine.receive(&bytes, invalidated);
        if self.machine.is_suspended() {
            self.resume();
        }
    }

    /// Executes the machine's actions, and checks them.
    fn drive(&mut self) {
        for _ in 0..MAX_ACTIONS {
            self.take_notices();
            let Some(action) = self.machine.poll(true, &mut self.bytes) else { return };
            match action {
                Action::Send { memory, .. } => self.check_message(memory),
                Action::Read { remote, local } => {
                    assert_eq!(remote.len, local.len, "a Read of two lengths");
                    assert!(local.offset >= OWN, "a Read into memory that is not the program's");
                    self.reads += 1;
                }
                Action::Write { local, remote } => {
                    assert_eq!(remote.len, local.len, "a Write of two lengths");
                    assert!(local.offset >= OWN, "a Write from memory that is not the program's");
                }
                Action::PostReceives { count, bytes } => assert!(count > 0 && bytes >= 37),
                Action::Reconnect { port } => {
                    assert!(port > 0 && self.reads == 0, "suspended in the middle of a Read");
                    self.machine.stream_ended();
                    assert!(self.machine.reconnect().is_some());
                    let ack = HelloAck { max_adverts: 2, buffer_bytes: 64, ird: 4, ord: 4 };
                    let mut greeting = Vec::new();
                    Message::HelloAck(ack).emit(Base { bufs: 3, ..Base::default() }, 0, &mut greeting);
                    self.machine.receive(&greeting, None);
                    (self.sent, self.received) = (0, 0);
                }
                Action::Disconnect | Action::Reset { .. } => {}
            }
        }
        panic!("the machine never rests");
    }

    fn check_message(&mut self, memory: Option<Advert>) {
        let mut whole = self.bytes.clone();
        if let Some(piece) = memory {
            assert!(piece.offset >= OWN, "payload from memory that is not the program's");
            whole.resize(whole.len() + piece.len as usize, 0);
        }
        let (base, message, _) = Message::parse(&whole).expect("a message that the peer cannot read");
        assert!(whole.len() <= self.most_message.max(37), "a message of {} bytes", whole.len());
        if !matches!(message, Message::HelloAck(_)) {
            self.sent = self.sent.wrapping_add(1);
            assert_eq!(base.mseq, Seq(self.sent), "numbers with a gap");
        }
    }

    fn take_notices(&mut self) {
        while let Some(notice) = self.machine.notice() {
            let (known, id) = match notice {
                Notice::Sent { id } => (&mut self.sending, id),
                Notice::Received { id, len, copied } => {
                    assert!(len <= MAX_PIECE && copied.len() <= len as usize);
                    (&mut self.receiving, id)
                }
                Notice::Withdrawn { id } => (&mut self.receiving, id),
            };
            let place = known.iter().position(|other| *other == id);
            known.swap_remove(place.expect("memory that is not in use was given back"));
        }
    }
}

/// Memory of the program; each piece begins where no other lies.
fn own_memory(input: &mut Input<'_>) -> Advert {
    let len = u32::from(input.u16()) % MAX_PIECE + 1;
    Advert { len, stag: input.u8().into(), offset: OWN + (u64::from(len) << 20) }
}
