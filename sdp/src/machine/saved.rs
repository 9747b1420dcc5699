//! A suspended machine as bytes, for its continuation in another service. Each number has eight bytes, big-endian; a string of bytes
//! follows its length.

use super::{
    Config, Machine, Phase, Role,
    sink::Sink,
    source::{MAX_MARKS, Segment, Source},
};
use crate::wire::{LEAST_BUFFER_BYTES, MAX_BYTES};

/// "xwsdp", and the version of the form.
const FORM: u64 = 0x7877_7364_7000_0001;

/// Bytes that are being written.
#[derive(Debug, Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn number(&mut self, number: impl TryInto<u64>) {
        // No number of ours exceeds 64 bits.
        self.0.extend(number.try_into().unwrap_or(u64::MAX).to_be_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: impl ExactSizeIterator<Item = u8>) {
        self.number(bytes.len());
        self.0.extend(bytes);
    }
}

/// Bytes that are being read. `None`: they are not what a [`Writer`] has written.
#[derive(Debug)]
pub(crate) struct Reader<'b>(pub(crate) &'b [u8]);

impl<'b> Reader<'b> {
    pub(crate) fn number<N: TryFrom<u64>>(&mut self) -> Option<N> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        u64::from_be_bytes(*number).try_into().ok()
    }

    pub(crate) fn flag(&mut self) -> Option<bool> {
        match self.number::<u8>()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    pub(crate) fn bytes(&mut self) -> Option<&'b [u8]> {
        let len = self.number()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }
}

impl Machine {
    /// Writes the state of a suspended machine. `None` if it is not suspended, or has memory of the program.
    pub(crate) fn save(&self, out: &mut Writer) -> Option<()> {
        if !self.is_suspended() {
            return None;
        }
        let Config { buffers, buffer_bytes, most_buffer_bytes, desired_bytes, .. } = self.config;
        let Config { send_bytes, receive_bytes, max_adverts, ird, ord, .. } = self.config;
        out.number(FORM);
        for number in [buffers, max_adverts, ird, ord] {
            out.number(number);
        }
        for number in [buffer_bytes, most_buffer_bytes, desired_bytes, self.resize.own_bytes] {
            out.number(number);
        }
        for number in [send_bytes, receive_bytes] {
            out.number(number);
        }
        let connected = self.role == Role::Connecting;
        for flag in [connected, self.closing, self.disconn_sent, self.resize.refused] {
            out.number(u8::from(flag));
        }
        self.source.save(out)?;
        self.sink.save(out)
    }

    /// The machine that [`Self::save`] has written. It is suspended: [`Self::resume`] continues it.
    pub(crate) fn restore(saved: &mut Reader<'_>) -> Option<Self> {
        if saved.number::<u64>()? != FORM {
            return None;
        }
        let [buffers, max_adverts, ird, ord] =
            [saved.number()?, saved.number()?, saved.number()?, saved.number()?];
        let (buffer_bytes, most_buffer_bytes) = (saved.number()?, saved.number()?);
        let (desired_bytes, own_bytes) = (saved.number()?, saved.number()?);
        let (send_bytes, receive_bytes) = (saved.number()?, saved.number()?);
        let config = Config {
            buffers,
            buffer_bytes,
            most_buffer_bytes,
            desired_bytes,
            send_bytes,
            receive_bytes,
            max_adverts,
            ird,
            ord,
        };
        let role = if saved.flag()? { Role::Connecting } else { Role::Accepting };
        let mut machine = Self::new(&config, role);
        machine.phase = Phase::Open;
        machine.closing = saved.flag()?;
        machine.disconn_sent = saved.flag()?;
        machine.resize.refused = saved.flag()?;
        machine.resize.own_bytes = own_bytes;
        machine.source = Source::restore(saved)?;
        machine.sink = Sink::restore(saved)?;
        machine.suspend.restore();
        (LEAST_BUFFER_BYTES..=MAX_BYTES).contains(&own_bytes).then_some(machine)
    }
}

impl Source {
    /// `None` if memory waits to be sent.
    fn save(&self, out: &mut Writer) -> Option<()> {
        let mut segments = self.segments.iter();
        match (segments.next(), segments.next()) {
            (None, _) => out.number(0_u8),
            (Some(Segment::Bytes(bytes)), None) => out.bytes(bytes.iter().copied()),
            _ => return None,
        }
        out.number(self.marks.len());
        for (left, pended) in &self.marks {
            out.number(*left);
            out.number(u8::from(*pended));
        }
        out.number(self.next_id);
        out.number(u8::from(self.closed));
        Some(())
    }

    fn restore(saved: &mut Reader<'_>) -> Option<Self> {
        let mut source = Self::new();
        source.write(saved.bytes()?);
        let mut last = 0;
        for _ in 0..saved.number::<usize>().filter(|marks| *marks <= MAX_MARKS)? {
            let (left, pended) = (saved.number()?, saved.flag()?);
            if left <= last || left > source.copied() as u64 {
                return None;
            }
            last = left;
            source.marks.push_back((left, pended));
        }
        (source.next_id, source.closed) = (saved.number()?, saved.flag()?);
        Some(source)
    }
}

impl Sink {
    /// `None` while a receive into memory waits.
    fn save(&self, out: &mut Writer) -> Option<()> {
        out.bytes(self.ring.iter().copied());
        for place in [self.mark, self.oob.map(usize::from)] {
            out.number(place.map_or(0, |place| place + 1));
        }
        out.number(self.next_id);
        out.number(u8::from(self.eof));
        out.number(u8::from(self.urgent));
        self.wants.is_empty().then_some(())
    }

    fn restore(saved: &mut Reader<'_>) -> Option<Self> {
        let mut sink = Self::new();
        sink.ring = saved.bytes()?.iter().copied().collect();
        let (mark, oob): (usize, u16) = (saved.number()?, saved.number()?);
        sink.mark = mark.checked_sub(1);
        sink.oob = oob.checked_sub(1).map(u8::try_from).transpose().ok()?;
        (sink.next_id, sink.eof, sink.urgent) = (saved.number()?, saved.flag()?, saved.flag()?);
        (sink.mark <= Some(sink.ring.len())).then_some(sink)
    }
}
