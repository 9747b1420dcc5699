//! The order of transmission: receives first, then messages without payload, RDMA, payload, DisConn, and credit
//! updates.

use super::{
    Action, Control, LEAST_BUFFERS, Machine, Phase,
    credit::Need,
    seeded::{Mistake, seeded},
    source::Payload,
    suspend::FAREWELL_RECEIVES,
};
use crate::wire::{BASE_BYTES, Base, Flags, Half, MAX_HEADER_BYTES, Message, Mode};

/// Number of waiting control messages above which no receives are posted until they are sent.
const MAX_CONTROL: usize = 64;
/// While receives can wait, they are posted when one in this many is due. A credit update needs twice as many that the peer does
/// not know of.
const POST_PART: u16 = 4;
/// Bytes of a SrcAvail's header.
const SRC_AVAIL_BYTES: u32 = BASE_BYTES as u32 + 16;

impl Machine {
    /// Number of receives to post now: two more than the ring has room for, since the peer leaves two for messages
    /// without payload. While the peer has enough of them, several are posted at a time.
    fn receives_due(&self) -> u16 {
        if self.control.len() >= MAX_CONTROL {
            return 0;
        }
        let room = self.config.receive_bytes.saturating_sub(self.sink.buffered());
        let room = room / self.resize.post_bytes().max(1) as usize;
        let most = usize::from(self.config.buffers).min(room + usize::from(LEAST_BUFFERS) - 1) as u16;
        let most = most + if self.suspend.prepares() { FAREWELL_RECEIVES } else { 0 };
        let posted = self.credits.posted - self.resize.old_left.min(self.credits.posted);
        let due = most.saturating_sub(posted);
        let few = due < self.config.buffers / POST_PART;
        if few && self.receives_can_wait() { 0 } else { due }
    }

    /// The next action; `out` is cleared, then gets the bytes of a message. With `can_send` false only receives are
    /// posted: the send queue is full.
    pub fn poll(&mut self, can_send: bool, out: &mut Vec<u8>) -> Option<Action> {
        out.clear();
        self.credits.freeze(self.sink.frozen_ack());
        if let Phase::Ended { reset, .. } = self.phase {
            return self.poll_end(reset, can_send, out);
        }
        if self.suspend.is_silent() {
            return if can_send { self.poll_silent(out) } else { None };
        }
        if self.phase != Phase::Open {
            return None;
        }
        // Payload does not wait for receives that the peer does not need yet.
        let after_payload = can_send && self.source.has_payload() && self.receives_can_wait();
        if !after_payload && let Some(action) = self.poll_receives() {
            return Some(action);
        }
        let action = if can_send { self.poll_open(out) } else { None };
        if action.is_none() && after_payload { self.poll_receives() } else { action }
    }

    /// Whether receives can be posted later: both ends can send payload for some time without new credit, and no message that
    /// waits depends on them. Receives that updates of the peer have used are posted before the next message; otherwise they would
    /// seem to earn the peer credit later.
    fn receives_can_wait(&self) -> bool {
        let credits = &self.credits;
        credits.posted > LEAST_BUFFERS.max(self.config.buffers / 2)
            && credits.updates_received() == 0
            && credits.allows(Need::Payload)
            && self.control.is_empty()
            && self.suspend.is_open()
    }

    /// Whether the next actions can wait for the program's next call: there is nothing to send, and the peer does not need the
    /// receives that are due.
    pub fn can_wait(&self) -> bool {
        self.phase == Phase::Open
            && self.receives_can_wait()
            && self.notices.is_empty()
            && self.source.is_idle()
            && self.sink.is_idle()
            && !self.closing
    }

    fn poll_receives(&mut self) -> Option<Action> {
        let count = self.receives_due();
        self.credits.posted += count;
        (count > 0).then(|| Action::PostReceives { count, bytes: self.resize.post_bytes() })
    }

    fn poll_open(&mut self, out: &mut Vec<u8>) -> Option<Action> {
        if let Some(action) = self.poll_control(out) {
            return Some(action);
        }
        if !self.suspend.is_open() {
            let action = self.poll_suspend(out);
            return action.or_else(|| self.poll_update(out));
        }
        if self.control.is_empty()
            && let Some(action) = self.poll_transfer(out)
        {
            return Some(action);
        }
        if self.closing && !self.disconn_sent && self.source.is_empty() && self.control.is_empty() {
            self.disconn_sent = true;
            self.source.close();
            self.disconnected = seeded(Mistake::FirstCloserWaits) && !self.sink.has_eof();
            self.control.push_back(Message::DisConn.into());
            return self.poll_open(out);
        }
        if self.disconn_sent && self.sink.has_eof() && self.control.is_empty() {
            // Both directions are closed: either end may end the stream below (decision 19).
            return (!std::mem::replace(&mut self.disconnected, true)).then_some(Action::Disconnect);
        }
        self.poll_update(out)
    }

    fn poll_end(&mut self, reset: Option<bool>, can_send: bool, out: &mut Vec<u8>) -> Option<Action> {
        if can_send && !self.control.is_empty() {
            return self.poll_control(out);
        }
        let flush = reset.filter(|_| self.control.is_empty())?;
        if let Phase::Ended { reset, .. } = &mut self.phase {
            *reset = None;
        }
        Some(Action::Reset { flush })
    }

    pub(super) fn poll_control(&mut self, out: &mut Vec<u8>) -> Option<Action> {
        loop {
            let Control { message, flags, invalidate } = *self.control.front()?;
            if matches!(message, Message::HelloAck(_)) {
                self.control.pop_front();
                let base = Base { bufs: self.config.buffers, ..Base::default() };
                message.emit(base, 0, out);
                return Some(Action::Send { memory: None, solicited: true, invalidate: None });
            }
            if !self.credits.allows(Need::Control) {
                return None;
            }
            self.control.pop_front();
            let seq = self.credits.last_sent().next();
            let useful = match message {
                Message::SrcAvailCancel => self.source.send_cancel(seq),
                Message::SinkAvailCancel => self.sink.send_cancel(seq),
                _ => true,
            };
            if !useful {
                continue;
            }
            match message {
                Message::ModeChange { half: Half::Receive, mode: Mode::Combined } => {
                    self.source.sent_mode_change(seq);
                }
                Message::ChRcvBuf { .. } => self.resize.sent_request(seq),
                _ => {}
            }
            return Some(self.send(message, Payload { flags, ..Payload::default() }, invalidate, out));
        }
    }

    /// RDMA and payload.
    fn poll_transfer(&mut self, out: &mut Vec<u8>) -> Option<Action> {
        if let Some((remote, local)) = self.sink.take_read() {
            return Some(Action::Read { remote, local });
        }
        let adverts = self.source.adverts() + self.sink.adverts();
        if self.credits.allows(Need::Control) {
            if let Some((local, remote)) = self.source.take_write(&mut self.notices) {
                let message = Message::RdmaWrCompl { len: local.len };
                let flags = self.sink.preference();
                self.control.push_back(Control { message, flags, invalidate: Some(remote.stag) });
                return Some(Action::Write { local, remote });
            }
            if adverts < self.peer_adverts
                && let Some((advert, non_discards)) = self.sink.take_sink_avail(self.resize.own_bytes)
            {
                let command = self.take_command(out);
                return Some(self.send(Message::SinkAvail { advert, non_discards }, command, None, out));
            }
        }
        let with_payload = self.source.src_avail_has_payload();
        let need = if with_payload { Need::Payload } else { Need::Control };
        if adverts < self.peer_adverts && self.credits.allows(need) && self.credits.available() >= 2 {
            let room = self.message_bytes().saturating_sub(SRC_AVAIL_BYTES);
            let seq = self.credits.last_sent().next();
            if let Some((advert, payload)) = self.source.take_src_avail(room, seq) {
                self.adjust();
                return Some(self.send(Message::SrcAvail(advert), payload, None, out));
            }
        }
        if self.credits.allows(Need::Payload) {
            let room = self.message_bytes().saturating_sub(BASE_BYTES as u32);
            // The payload is written before its header, whose flags depend on what is taken.
            out.resize(BASE_BYTES, 0);
            let Some(payload) = self.source.take_data(room, out, &mut self.notices) else {
                out.clear();
                return None;
            };
            return Some(self.send(Message::Data, payload, None, out));
        }
        None
    }

    /// The payload of a SinkAvail: bytes that the program has sent before it posted the receive (a Transaction, draft section
    /// 9.4).
    fn take_command(&mut self, out: &mut Vec<u8>) -> Payload {
        if !self.credits.allows(Need::Payload) {
            return Payload::default();
        }
        let room = self.message_bytes().saturating_sub(MAX_HEADER_BYTES as u32);
        out.resize(MAX_HEADER_BYTES, 0);
        self.source.take_command(room, out, &mut self.notices).unwrap_or_default()
    }

    /// The longest message that we send: it fits the peer's receives and our own send buffers.
    fn message_bytes(&self) -> u32 {
        self.resize.peer_bytes.min(self.config.desired_bytes)
    }

    /// Credit updates, and OOB_PEND for a byte that cannot be sent yet.
    fn poll_update(&mut self, out: &mut Vec<u8>) -> Option<Action> {
        let blocked = self.source.has_payload() && !self.credits.allows(Need::Payload);
        let pending = self.source.pending_due() && self.credits.available() >= 2;
        let prompt = blocked && self.credits.prompt_due();
        if !(pending || prompt || self.credits.update_due(self.config.buffers)) {
            return None;
        }
        if prompt {
            self.credits.prompt();
        }
        let flags = if pending { self.source.take_pending() } else { Flags::empty() };
        Some(self.send(Message::Data, Payload { flags, ..Payload::default() }, None, out))
    }

    /// Completes a message: `out` is empty, or has copied payload behind room for the header.
    pub(super) fn send(
        &mut self,
        message: Message,
        payload: Payload,
        invalidate: Option<u32>,
        out: &mut Vec<u8>,
    ) -> Action {
        let Payload { flags, memory, len } = payload;
        let is_update = message == Message::Data && len == 0 && !flags.contains(Flags::OOB_PEND);
        let base = self.credits.stamp(flags, is_update);
        let header =
            if out.is_empty() { message.emit(base, len, out) } else { message.emit_before(base, len, out) };
        if len > 0 {
            self.resize.sent_payload(header as u32 + len, &mut self.control);
        }
        Action::Send { memory, solicited: message.is_solicited(flags), invalidate }
    }
}
