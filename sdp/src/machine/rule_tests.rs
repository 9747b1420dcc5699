//! Single rules of the draft, each tested on one machine with a conforming peer.

use super::{
    Action, Config, End, Machine, Mode, Notice, Reader, Violation, Writer,
    model_tests::config,
    reaction_tests::{Link, memory},
};
use crate::wire::{Base, Flags, Half, Hello, Message, Seq};

const NONE: Flags = Flags::empty();

fn mode_change(mode: Mode) -> Message {
    Message::ModeChange { half: Half::Receive, mode }
}

/// A connection whose receiving half is in Pipelined mode.
fn pipelined_sink() -> Link {
    let mut link = Link::new();
    link.take(mode_change(Mode::Pipelined), NONE, b"");
    link
}

/// A connection whose sending half is in Pipelined mode.
fn pipelined_source() -> Link {
    let mut link = Link::new();
    assert!(link.machine.change_mode(Mode::Pipelined));
    assert!(matches!(link.messages()[..], [(_, Message::ModeChange { .. }, 0)]));
    link
}

fn kinds(messages: &[(Base, Message, usize)]) -> Vec<Message> {
    messages.iter().map(|(_, message, _)| *message).collect()
}

fn received(link: &mut Link) -> Vec<(u64, u32, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some(notice) = link.machine.notice() {
        if let Notice::Received { id, len, copied } = notice {
            all.push((id, len, copied));
        }
    }
    all
}

fn sink_avail(stag: u32, non_discards: u32) -> Message {
    Message::SinkAvail { advert: memory(50, stag), non_discards }
}

#[test]
fn sdp_s6_1_3_bufs_are_receives_posted_less_messages_received() {
    let mut link = Link::new();
    let mut out = Vec::new();
    let (mut posted, mut taken) = (8, 0);
    for round in 0..40_u32 {
        link.take(Message::Data, NONE, b"x");
        taken += 1;
        link.machine.read(&mut [0; 8]);
        if round % 3 == 0 {
            link.machine.write(b"y");
        }
        while let Some(action) = link.machine.poll(true, &mut out) {
            match action {
                Action::PostReceives { count, .. } => posted += u32::from(count),
                Action::Send { .. } => {
                    let (base, ..) = Message::parse(&out).unwrap();
                    assert_eq!(u32::from(base.bufs), posted - taken, "round {round}");
                    assert_eq!(base.mseq_ack, Seq(taken), "the last number received");
                    link.sent_one();
                }
                _ => {}
            }
        }
    }
}

#[test]
fn sdp_s6_1_6_nothing_received_is_acknowledged_by_zero() {
    let mut link = Link::new();
    link.machine.write(b"abc");
    let messages = link.messages();
    assert!(
        matches!(messages[..], [(Base { mseq: Seq(1), mseq_ack: Seq(0), .. }, Message::Data, 3)]),
        "{messages:?}"
    );
}

#[test]
fn sdp_s9_2_src_avail_has_payload_in_combined_mode_only() {
    let mut link = Link::new();
    link.machine.write_memory(memory(100, 5));
    link.machine.write_memory(memory(100, 6));
    let messages = link.messages();
    assert!(
        matches!(messages[..], [(_, Message::SrcAvail(advert), 5)] if advert == memory(100, 5)),
        "one at a time, which describes all of the memory: {messages:?}"
    );
    let mut link = pipelined_source();
    link.machine.write_memory(memory(100, 5));
    link.machine.write_memory(memory(100, 6));
    let messages = link.messages();
    assert!(
        matches!(messages[..], [(_, Message::SrcAvail(_), 0), (_, Message::SrcAvail(_), 0)]),
        "{messages:?}"
    );
}

#[test]
fn sdp_s9_2_no_payload_passes_a_src_avail() {
    for mut link in [Link::new(), pipelined_source()] {
        link.machine.write_memory(memory(100, 5));
        assert_eq!(link.messages().len(), 1);
        link.machine.write(b"behind");
        assert!(link.messages().is_empty());
    }
}

/// RdmaRdCompl follows the completion of the Read, for the oldest SrcAvail, and counts what the Read has brought.
#[test]
fn sdp_s9_2_rd_compl_follows_the_read_and_counts_no_payload() {
    let mut link = Link::new();
    link.machine.read_memory(memory(60, 1));
    link.take(Message::SrcAvail(memory(100, 70)), NONE, b"abc");
    assert_eq!(received(&mut link), [(0, 3, b"abc".to_vec())]);
    link.machine.read_memory(memory(60, 2));
    let actions = link.drive();
    assert!(
        matches!(actions[..], [(Action::Read { remote, .. }, None)] if (remote.offset, remote.len) == (3, 60)),
        "no message before the Read is complete: {actions:?}"
    );
    link.machine.read_done();
    link.machine.read_memory(memory(60, 3));
    let actions = link.drive();
    let [
        (Action::Send { invalidate: None, .. }, Some((_, Message::RdmaRdCompl { len: 60 }))),
        (Action::Read { remote, .. }, None),
    ] = actions[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!((remote.offset, remote.len), (63, 37));
    link.machine.read_done();
    let actions = link.drive();
    assert!(
        matches!(
            actions[..],
            [(
                Action::Send { invalidate: Some(70), solicited: true, .. },
                Some((_, Message::RdmaRdCompl { len: 37 }))
            )]
        ),
        "the bytes since the last one: {actions:?}"
    );
}

/// The source: parts that were read, then SendSm; the rest goes in Data messages before anything else.
#[test]
fn sdp_s9_2_after_send_sm_the_rest_is_sent_in_data() {
    let mut link = pipelined_source();
    link.machine.write_memory(memory(40, 5));
    link.machine.write_memory(memory(40, 6));
    assert_eq!(link.messages().len(), 2);
    link.take(Message::RdmaRdCompl { len: 10 }, NONE, b"");
    link.take(Message::SendSm, NONE, b"");
    let messages = link.messages();
    let sizes: Vec<usize> = messages.iter().map(|(_, _, len)| *len).collect();
    assert_eq!(
        (kinds(&messages), sizes),
        (vec![Message::Data; 2], vec![21, 9]),
        "the second stays advertised"
    );
    link.take(Message::RdmaRdCompl { len: 40 }, NONE, b"");
    assert!(link.machine.is_all_sent());
}

/// The sink: data requested by SendSm comes before Reads of later SrcAvails.
#[test]
fn sdp_s9_2_the_data_of_send_sm_comes_before_other_reads() {
    let mut link = pipelined_sink();
    link.take(Message::SrcAvail(memory(10, 70)), NONE, b"");
    link.take(Message::SrcAvail(memory(60, 71)), NONE, b"");
    link.machine.want_messages();
    link.machine.read_memory(memory(60, 1));
    assert_eq!(kinds(&link.messages()), [Message::SendSm]);
    link.take(Message::Data, NONE, b"012345");
    assert_eq!(received(&mut link).len(), 1);
    link.machine.read_memory(memory(60, 2));
    assert!(link.drive().is_empty(), "four bytes are missing");
    link.take(Message::Data, NONE, b"6789");
    link.machine.read_memory(memory(60, 3));
    assert!(
        link.drive()
            .iter()
            .any(|(action, _)| matches!(action, Action::Read { remote, .. } if remote.stag == 71))
    );
}

#[test]
fn sdp_s9_5_1_a_message_completes_exactly_one_advertised_buffer() {
    let mut link = pipelined_sink();
    for stag in 1..=2 {
        link.machine.read_memory(memory(50, stag));
    }
    let adverts = link.messages();
    assert!(
        adverts.iter().all(|(_, message, _)| matches!(message, Message::SinkAvail { non_discards: 0, .. }))
    );
    assert_eq!(adverts.len(), 2);
    link.take(Message::Data, NONE, b"a");
    link.take(Message::Data, NONE, b"bc");
    assert_eq!(received(&mut link), [(0, 1, b"a".to_vec()), (1, 2, b"bc".to_vec())]);
    // A message that finds no advertised buffer is counted.
    link.take(Message::Data, NONE, b"d");
    link.machine.read(&mut [0; 4]);
    link.machine.read_memory(memory(50, 3));
    assert!(link.messages().iter().any(|(_, m, _)| matches!(m, Message::SinkAvail { non_discards: 1, .. })));
}

/// The example of the draft: two payload messages sent, three SinkAvails that know of none.
#[test]
fn sdp_s9_5_1_the_drafts_example_of_stale_advertisements() {
    let mut link = Link::with(&Config { max_adverts: 3, ..config(8) });
    assert!(link.machine.change_mode(Mode::Pipelined));
    for byte in [b"x", b"y"] {
        link.machine.write(byte);
        link.messages();
    }
    for stag in 11..=13 {
        link.take(sink_avail(stag, 0), NONE, b"");
    }
    link.machine.write_memory(memory(50, 5));
    let actions = link.drive();
    assert!(matches!(actions[0].0, Action::Write { remote, .. } if remote.stag == 13), "{actions:?}");
}

#[test]
fn sdp_s9_3_a_write_is_reported_once_behind_it_and_invalidates() {
    let mut link = pipelined_source();
    link.take(sink_avail(11, 0), NONE, b"");
    link.machine.write_memory(memory(30, 5));
    let actions = link.drive();
    assert!(
        matches!(
            actions[..],
            [
                (Action::Write { local, remote }, None),
                (
                    Action::Send { invalidate: Some(11), solicited: true, .. },
                    Some((_, Message::RdmaWrCompl { len: 30 }))
                )
            ] if local == memory(30, 5) && remote == memory(30, 11)
        ),
        "{actions:?}"
    );
}

/// RdmaWrCompl is for the oldest SinkAvail, and ends it when it is short (decision 15).
#[test]
fn sdp_s9_3_wr_compl_ends_the_oldest_advertisement() {
    let mut link = pipelined_sink();
    link.machine.read_memory(memory(50, 1));
    link.machine.read_memory(memory(50, 2));
    assert_eq!(link.messages().len(), 2);
    link.take(Message::RdmaWrCompl { len: 7 }, NONE, b"");
    assert_eq!(received(&mut link), [(0, 7, Vec::new())]);
    for (len, key, violation) in [(51, None, Violation::Completion), (50, Some(1), Violation::Invalidation)] {
        let mut machine = link.machine.clone();
        let mut bytes = Vec::new();
        Message::RdmaWrCompl { len }.emit(link.base(), 0, &mut bytes);
        machine.receive(&bytes, key);
        assert_eq!(machine.ended(), Some(End::Violated(violation)));
    }
}

/// Fresh SinkAvails have precedence over our SrcAvails; what is left is advertised again.
#[test]
fn sdp_s11_3_a_fresh_sink_avail_voids_src_avails() {
    let mut link = pipelined_source();
    link.machine.write_memory(memory(80, 5));
    assert!(matches!(link.messages()[..], [(_, Message::SrcAvail(_), 0)]));
    link.take(sink_avail(11, 0), NONE, b"");
    let actions = link.drive();
    assert!(matches!(actions[0].0, Action::Write { local, .. } if local == memory(50, 5)), "{actions:?}");
    let again = actions.iter().any(|(_, sent)| {
        matches!(sent, Some((_, Message::SrcAvail(advert))) if (advert.offset, advert.len) == (50, 30))
    });
    assert!(again, "{actions:?}");
}

#[test]
fn sdp_s11_3_a_sink_with_advertised_memory_ignores_src_avails() {
    let mut link = pipelined_sink();
    link.machine.read_memory(memory(50, 1));
    assert_eq!(link.messages().len(), 1);
    link.take(Message::SrcAvail(memory(80, 70)), NONE, b"");
    assert!(!link.machine.has_offer());
    link.take(Message::RdmaWrCompl { len: 50 }, NONE, b"");
    assert!(link.drive().is_empty());
}

#[test]
fn sdp_s11_3_no_sink_avail_while_a_src_avail_is_unprocessed() {
    let mut link = pipelined_sink();
    link.take(Message::SrcAvail(memory(80, 70)), NONE, b"");
    link.machine.read_memory(memory(50, 1));
    let actions = link.drive();
    assert!(matches!(actions[..], [(Action::Read { .. }, None)]), "{actions:?}");
    link.machine.read_memory(memory(50, 2));
    assert!(link.drive().is_empty(), "the Read is in process");
}

/// MaxAdverts bounds the sent advertisements of both kinds together (decision 7).
#[test]
fn sdp_s11_3_max_adverts_bounds_both_kinds_together() {
    let mut link = pipelined_source();
    link.take(mode_change(Mode::Pipelined), NONE, b"");
    for stag in 1..=2 {
        link.machine.read_memory(memory(50, stag));
        link.machine.write_memory(memory(50, stag));
    }
    let adverts = link.messages();
    assert_eq!(adverts.len(), 2, "{adverts:?}");
    // It also bounds the peer's advertisements.
    let mut link = pipelined_source();
    link.take(mode_change(Mode::Pipelined), NONE, b"");
    link.take(Message::SrcAvail(memory(80, 70)), NONE, b"");
    link.take(sink_avail(11, 0), NONE, b"");
    link.give(link.base(), sink_avail(12, 0), b"", None);
    assert_eq!(link.machine.ended(), Some(End::Violated(Violation::TooManyAdverts)));
}

#[test]
fn sdp_s9_5_4_a_cancel_drops_what_is_unprocessed_with_one_send_sm() {
    let mut link = pipelined_sink();
    link.take(Message::SrcAvail(memory(80, 70)), NONE, b"");
    link.take(Message::SrcAvail(memory(80, 71)), NONE, b"");
    link.take(Message::SrcAvailCancel, NONE, b"");
    let messages = link.messages();
    assert!(matches!(messages[..], [(Base { mseq_ack: Seq(4), .. }, Message::SendSm, 0)]), "{messages:?}");
    link.take(Message::SrcAvailCancel, NONE, b"");
    assert!(link.messages().is_empty(), "nothing is left: ignored");
}

/// MSeqAck stays below the SrcAvailCancel during a Read, and no other Read begins.
#[test]
fn sdp_s9_5_4_mseq_ack_is_held_back_while_a_read_is_in_process() {
    let mut link = pipelined_sink();
    link.take(Message::SrcAvail(memory(80, 70)), NONE, b"");
    link.take(Message::SrcAvail(memory(80, 71)), NONE, b"");
    link.machine.read_memory(memory(50, 1));
    assert_eq!(link.drive().len(), 1);
    link.take(Message::SrcAvailCancel, NONE, b"");
    link.machine.read_memory(memory(50, 2));
    link.machine.write(b"x");
    let messages = link.messages();
    assert!(matches!(messages[..], [(Base { mseq_ack: Seq(3), .. }, Message::Data, 1)]), "{messages:?}");
    link.machine.read_done();
    let messages = link.messages();
    assert_eq!(kinds(&messages)[..2], [Message::RdmaRdCompl { len: 50 }, Message::SendSm]);
    assert_eq!(messages[1].0.mseq_ack, Seq(4));
}

#[test]
fn sdp_s9_5_4_no_src_avail_until_the_cancel_is_answered() {
    let mut link = pipelined_source();
    link.machine.write_memory(memory(80, 5));
    link.messages();
    link.machine.cancel_writes();
    link.machine.write_memory(memory(80, 6));
    let cancel = link.messages();
    assert_eq!(kinds(&cancel), [Message::SrcAvailCancel]);
    // The SendSm acknowledges the cancel: all goes in messages, the later memory is advertised behind them.
    link.take(Message::SendSm, NONE, b"");
    let messages = link.messages();
    let sent: usize = messages.iter().map(|(_, _, len)| len).sum();
    assert_eq!(sent, 80, "{messages:?}");
    assert_eq!(messages.iter().filter(|(_, m, _)| matches!(m, Message::SrcAvail(_))).count(), 1);
}

#[test]
fn sdp_s9_5_5_a_cancel_of_sink_avails_is_answered_once() {
    let mut link = pipelined_source();
    link.take(sink_avail(11, 0), NONE, b"");
    link.take(sink_avail(12, 0), NONE, b"");
    link.take(Message::SinkAvailCancel, NONE, b"");
    assert_eq!(kinds(&link.messages()), [Message::SinkCancelAck]);
    link.take(Message::SinkAvailCancel, NONE, b"");
    assert!(link.messages().is_empty(), "nothing is left: ignored");
}

#[test]
fn sdp_s9_5_5_no_sink_avail_until_the_cancel_is_answered() {
    let mut link = pipelined_sink();
    link.machine.read_memory(memory(50, 1));
    link.messages();
    link.machine.cancel_reads();
    assert_eq!(kinds(&link.messages()), [Message::SinkAvailCancel]);
    link.machine.read_memory(memory(50, 2));
    link.machine.cancel_reads();
    link.machine.read_memory(memory(50, 3));
    assert!(link.messages().is_empty(), "neither a SinkAvail nor a second cancel");
    link.take(Message::SinkCancelAck, NONE, b"");
    let messages = link.messages();
    assert!(
        matches!(messages[..], [(_, Message::SinkAvail { advert, .. }, 0)] if advert.stag == 3),
        "{messages:?}"
    );
}

/// OOB_PEND once, at most 65535 bytes before its byte, which ends a Data message.
#[test]
fn sdp_s9_5_3_oob_pend_is_sent_once_and_not_too_early() {
    let large = Config {
        send_bytes: 200_000,
        buffer_bytes: 4096,
        most_buffer_bytes: 4096,
        desired_bytes: 4096,
        ..config(8)
    };
    let mut link = Link::with(&large);
    assert_eq!(link.machine.write(&vec![7; 150_000]), 150_000);
    assert!(link.machine.write_oob(b'!'));
    link.machine.write(b"behind");
    let (mut at, mut pends, mut present) = (0, Vec::new(), Vec::new());
    while at < 150_007 {
        for (base, message, len) in link.messages() {
            assert_eq!(message, Message::Data);
            if base.flags.contains(Flags::OOB_PEND) {
                pends.push(at);
            }
            at += len;
            if base.flags.contains(Flags::OOB_PRES) {
                present.push(at);
            }
        }
        link.take(Message::Data, NONE, b"");
    }
    assert_eq!(present, [150_001]);
    assert!(matches!(pends[..], [pend] if 150_001 - pend <= 65_535), "{pends:?}");
}

/// Messages that may be sent with three, two, one and no credit (draft section 10.5).
#[test]
fn sdp_s10_5_reserved_credits_are_kept() {
    for bufs in 0..=3 {
        let mut link = Link::new();
        link.give(Base { bufs, ..link.base() }, Message::Data, b"", None);
        link.machine.write(b"x");
        let payload = link.messages().iter().filter(|(_, _, len)| *len > 0).count();
        assert_eq!(payload, usize::from(bufs == 3), "{bufs} credits");

        let mut link = Link::new();
        // No receive is posted again, so that no message raises the peer's credit.
        link.give(Base { bufs, ..link.base() }, Message::Data, b"", None);
        link.machine.config.buffers = 6;
        for mode in [Mode::Pipelined, Mode::Combined] {
            assert!(link.machine.change_mode(mode));
        }
        let sent = link.messages().len();
        assert_eq!(sent, usize::from(bufs.saturating_sub(1)), "{bufs} credits: the last is reserved");
    }
    // The last credit is for messages that give credit.
    let mut link = Link::new();
    link.give(Base { bufs: 1, ..link.base() }, Message::Data, b"", None);
    assert!(link.machine.change_mode(Mode::Pipelined));
    let messages = link.messages();
    assert!(
        matches!(messages[..], [(base, Message::ModeChange { .. }, 0)] if base.mseq_ack.plus(base.bufs.into()).0 > 8),
        "{messages:?}"
    );
}

/// The peer has one credit, so an update follows although there is nothing else to send.
#[test]
fn sdp_s10_4_a_peer_with_one_credit_gets_more() {
    let mut link = Link::new();
    for _ in 0..6 {
        let base = link.base();
        link.give(Base { mseq_ack: Seq(0), ..base }, Message::Data, b"x", None);
        link.machine.read(&mut [0; 4]);
    }
    // Six of eight are used: two are left. The next leaves one.
    let base = link.base();
    link.give(Base { mseq_ack: Seq(0), ..base }, Message::Data, b"", None);
    let messages = link.messages();
    assert!(matches!(messages[..], [(base, Message::Data, 0)] if base.bufs >= 3), "{messages:?}");
}

/// All pairs of modes: only the transitions of figure 26, each with the fields of section 12.
#[test]
fn sdp_s12_only_the_transitions_of_figure_26() {
    use Mode::{Buffered, Combined, Pipelined};
    for (from, to, legal) in [
        (Combined, Combined, false),
        (Combined, Buffered, true),
        (Combined, Pipelined, true),
        (Pipelined, Combined, true),
        (Pipelined, Pipelined, false),
        (Pipelined, Buffered, false),
        (Buffered, Buffered, false),
        (Buffered, Combined, false),
        (Buffered, Pipelined, false),
    ] {
        let mut link = Link::new();
        assert!(from == Combined || link.machine.change_mode(from));
        link.messages();
        link.take(Message::Data, NONE, b"");
        assert_eq!(link.machine.change_mode(to), legal, "{from:?} to {to:?}");
        assert_eq!(link.machine.modes().0, if legal { to } else { from });
        let sent = kinds(&link.messages());
        let expected: &[Message] = if legal { &[mode_change(to)] } else { &[] };
        assert_eq!(sent, expected, "{from:?} to {to:?}");
    }
    let mut link = Link::new();
    assert!(!link.machine.leave_buffered());
    link.take(mode_change(Buffered), NONE, b"");
    assert_eq!(link.machine.modes(), (Combined, Buffered), "each direction has its own mode");
    assert!(link.machine.leave_buffered());
    assert_eq!(kinds(&link.messages()), [Message::ModeChange { half: Half::Send, mode: Combined }]);
}

#[test]
fn sdp_s12_1_a_src_avail_forbids_buffered_mode() {
    let mut link = Link::new();
    link.machine.write_memory(memory(50, 5));
    link.messages();
    assert!(!link.machine.change_mode(Mode::Buffered));
    link.take(Message::RdmaRdCompl { len: 45 }, NONE, b"");
    assert!(link.machine.change_mode(Mode::Buffered));
    link.machine.write_memory(memory(50, 6));
    let messages = link.messages();
    assert!(messages[1..].iter().all(|(_, message, _)| *message == Message::Data), "{messages:?}");
}

/// Leaving Pipelined mode: held SinkAvails are dropped, late ones ignored, no other change before the acknowledgement.
#[test]
fn sdp_s12_4_leaving_pipelined_mode() {
    let mut link = pipelined_source();
    link.take(sink_avail(11, 0), NONE, b"");
    let unseen = link.base().mseq_ack;
    assert!(link.machine.change_mode(Mode::Combined));
    assert_eq!(kinds(&link.messages()), [mode_change(Mode::Combined)]);
    let late = |link: &mut Link, message| {
        let base = Base { mseq_ack: unseen, ..link.base() };
        link.give(base, message, b"", None);
        assert_eq!(link.machine.ended(), None);
    };
    late(&mut link, sink_avail(12, 0));
    assert!(!link.machine.change_mode(Mode::Pipelined) && !link.machine.change_mode(Mode::Buffered));
    link.machine.write_memory(memory(50, 5));
    let actions = link.drive();
    assert!(matches!(actions[..], [(_, Some((_, Message::SrcAvail(_))))]), "no RDMA Write: {actions:?}");
    link.take(Message::Data, NONE, b"");
    assert!(link.machine.change_mode(Mode::Pipelined));
}

#[test]
fn sdp_s12_4_the_sink_drops_its_sink_avails() {
    let mut link = pipelined_sink();
    link.machine.read_memory(memory(50, 1));
    assert_eq!(link.messages().len(), 1);
    link.take(mode_change(Mode::Combined), NONE, b"");
    link.machine.read_memory(memory(50, 2));
    assert!(link.messages().is_empty(), "no SinkAvail in Combined mode");
    link.take(Message::Data, NONE, b"abc");
    assert_eq!(received(&mut link), [(0, 3, b"abc".to_vec())]);
}

#[test]
fn sdp_s8_2_1_disconn_follows_all_data_and_nothing_is_taken_behind_it() {
    let mut link = Link::new();
    link.machine.write_memory(memory(50, 5));
    link.machine.shutdown();
    assert_eq!(link.machine.write(b"late"), 0);
    assert!(!link.machine.write_oob(1));
    assert!(matches!(link.messages()[..], [(_, Message::SrcAvail(_), 5)]), "the Read is awaited");
    link.take(Message::RdmaRdCompl { len: 45 }, NONE, b"");
    assert_eq!(kinds(&link.messages()), [Message::DisConn]);
    // The other direction continues.
    link.take(Message::Data, NONE, b"abc");
    assert_eq!(link.machine.read(&mut [0; 4]), 3);
    link.take(Message::DisConn, NONE, b"");
    assert!(link.drive().iter().any(|(action, _)| matches!(action, Action::Disconnect)));
    link.machine.stream_ended();
    assert_eq!(link.machine.ended(), Some(End::Graceful));
}

#[test]
fn sdp_s8_2_1_disconn_ends_receives_and_their_advertisements() {
    let mut link = pipelined_sink();
    link.machine.read_memory(memory(50, 1));
    assert_eq!(link.messages().len(), 1);
    link.take(Message::DisConn, NONE, b"");
    link.machine.read_memory(memory(50, 2));
    assert_eq!(received(&mut link), [(0, 0, Vec::new()), (1, 0, Vec::new())]);
    assert_eq!(link.machine.write(b"still"), 5);
}

#[test]
fn sdp_s8_2_2_the_end_without_disconn_and_abort_conn_are_abortive() {
    let mut link = Link::new();
    link.machine.stream_ended();
    assert_eq!(link.machine.ended(), Some(End::Reset));
    let mut link = Link::new();
    link.take(Message::DisConn, NONE, b"");
    link.machine.write(b"unsent");
    link.give(link.base(), Message::AbortConn, b"", None);
    assert_eq!(link.machine.ended(), Some(End::Reset));
    assert!(link.messages().is_empty(), "unsent data is discarded");
}

/// A request for larger receives: old size for SinkAvails until the Ack, which follows the last old receive.
#[test]
fn sdp_s10_6_the_old_size_counts_until_the_ack() {
    let mut link = Link::with(&Config { most_buffer_bytes: 80, ..config(3) });
    link.take(mode_change(Mode::Pipelined), NONE, b"");
    link.take(Message::ChRcvBuf { bytes: 80 }, NONE, b"");
    let mut acked = None;
    for round in 0..6 {
        for (_, message, _) in link.messages() {
            if let Message::ChRcvBufAck { bytes } = message {
                acked.get_or_insert((round, bytes));
            }
        }
        link.take(Message::Data, NONE, b"");
    }
    let (round, bytes) = acked.expect("no Ack");
    assert!(round > 0 && bytes == 80, "after {round} messages");
    link.machine.read_memory(memory(80, 1));
    assert!(
        !kinds(&link.messages()).iter().any(|m| matches!(m, Message::SinkAvail { .. })),
        "not larger than 80"
    );
    let mut same = Link::new();
    for bytes in [37, 1000] {
        same.take(Message::ChRcvBuf { bytes }, NONE, b"");
        assert_eq!(
            kinds(&same.messages()),
            [Message::ChRcvBufAck { bytes: 37 }],
            "unwilling: the size it has"
        );
    }
}

/// The answering end: the Read in process is finished and reported, then SuspCommAck, then silence until the new set-up.
#[test]
fn sdp_s13_1_1_susp_comm_is_answered_after_transfers_in_process() {
    let mut link = Link::new();
    link.machine.read_memory(memory(60, 1));
    link.take(Message::SrcAvail(memory(100, 70)), NONE, b"a");
    link.machine.read_memory(memory(60, 2));
    assert_eq!(link.drive().len(), 1, "a Read");
    link.machine.write(b"not sent any more");
    link.take(Message::SuspComm { port: 4791 }, NONE, b"");
    assert!(link.drive().is_empty(), "the Read is in process");
    link.machine.read_done();
    let actions = link.drive();
    assert!(
        matches!(
            actions[..],
            [
                (_, Some((_, Message::RdmaRdCompl { len: 60 }))),
                (Action::Send { solicited: true, .. }, Some((_, Message::SuspCommAck))),
                (Action::Reconnect { port: 4791 }, None)
            ]
        ),
        "{actions:?}"
    );
    link.machine.write(b"more");
    link.machine.read_memory(memory(60, 3));
    assert!(link.drive().is_empty(), "silence");
    link.machine.stream_ended();
    assert_eq!(link.machine.ended(), None, "the end of the old stream is part of it");
    let hello = link.machine.reconnect().unwrap();
    assert!(matches!(Message::parse(&hello), Ok((Base { mseq: Seq(0), .. }, Message::Hello(_), b""))));
    assert_eq!(link.machine.receives_to_post().0, 9, "one for the HelloAck");
    assert_eq!(link.machine.modes(), (Mode::Combined, Mode::Combined));
}

/// The asking end: transfers of its own end first, then SuspComm with a solicited event, then silence; the rest is sent again.
#[test]
fn sdp_s13_1_1_the_asking_end_is_silent_until_the_new_set_up() {
    let mut link = Link::new();
    link.machine.write_memory(memory(50, 5));
    assert_eq!(link.messages().len(), 1);
    assert!(!link.machine.suspend(0) && link.machine.suspend(4791) && !link.machine.suspend(4792));
    link.machine.write(b"later");
    let actions = link.drive();
    assert!(
        matches!(actions[..], [(Action::Send { solicited: true, .. }, Some((base, Message::SuspComm { port: 4791 })))] if base.bufs >= 12),
        "{actions:?}"
    );
    link.machine.shutdown();
    link.take(Message::RdmaRdCompl { len: 40 }, NONE, b"");
    link.take(Message::Data, NONE, b"abc");
    assert!(link.drive().is_empty() && !link.machine.is_suspended(), "silence");
    link.take(Message::SuspCommAck, NONE, b"");
    assert!(link.machine.is_suspended());
    link.machine.stream_ended();
    let (_, hello) = Machine::connect(&config(8));
    link.machine.resume(&hello).unwrap();
    link.restart();
    let messages = link.messages();
    assert!(matches!(messages[0].1, Message::HelloAck(_)), "{messages:?}");
    // Five bytes went with the SrcAvail and forty were read: the last five are sent again.
    assert!(
        matches!(messages[1], (Base { mseq: Seq(1), mseq_ack: Seq(0), .. }, Message::SrcAvail(advert), 4) if (advert.offset, advert.len) == (45, 5)),
        "{messages:?}"
    );
    let mut bytes = [0; 4];
    assert_eq!(link.machine.read(&mut bytes), 3, "what was buffered stays");
}

/// Another process may be of another version, or have only a part of the bytes.
#[test]
fn sdp_s13_1_1_a_saved_machine_is_refused_when_cut_and_harmless_when_changed() {
    let mut link = Link::new();
    assert!(link.machine.save(&mut Writer::default()).is_none(), "not suspended");
    assert!(link.machine.suspend(4791));
    link.drive();
    link.machine.write(b"unsent");
    assert!(link.machine.write_oob(b'!') && link.machine.write_oob(b'?'));
    link.machine.shutdown();
    link.take(Message::Data, Flags::OOB_PEND, b"");
    link.take(Message::Data, Flags::OOB_PRES, b"unread!");
    link.take(Message::DisConn, NONE, b"");
    link.take(Message::SuspCommAck, NONE, b"");
    let mut saved = Writer::default();
    link.machine.save(&mut saved).unwrap();
    let (_, hello) = Machine::connect(&config(8));
    let mut restored = Machine::restore(&mut Reader(&saved.0)).unwrap();
    link.machine.resume(&hello).unwrap();
    restored.resume(&hello).unwrap();
    assert_eq!(restored, link.machine);
    for len in 0..saved.0.len() {
        assert!(Machine::restore(&mut Reader(&saved.0[..len])).is_none(), "{len} bytes");
    }
    for (at, value) in (0..saved.0.len()).flat_map(|at| [(at, 0), (at, 1), (at, 0xff)]) {
        let mut changed = saved.0.clone();
        changed[at] = value;
        if let Some(mut machine) = Machine::restore(&mut Reader(&changed))
            && machine.resume(&hello).is_ok()
        {
            let mut out = Vec::new();
            let actions = (0..20).filter_map(|_| machine.poll(true, &mut out)).count();
            assert!(actions > 0, "no HelloAck");
            while machine.read(&mut [0; 100]) > 0 {}
        }
    }
}

/// When requests to suspend cross, the accepting end of the first set-up disregards the other's.
#[test]
fn sdp_s13_1_2_of_crossing_suspensions_the_connecting_end_answers() {
    let mut link = Link::new();
    assert!(link.machine.suspend(4791));
    let before = link.base().mseq_ack;
    assert_eq!(kinds(&link.messages()), [Message::SuspComm { port: 4791 }]);
    let crossing = Base { mseq_ack: before, ..link.base() };
    link.give(crossing, Message::SuspComm { port: 4792 }, b"", None);
    assert!(link.drive().is_empty() && link.machine.ended().is_none());
    link.take(Message::SuspCommAck, NONE, b"");
    assert!(link.machine.is_suspended());

    let (mut machine, _) = Machine::connect(&config(8));
    let mut out = Vec::new();
    Message::HelloAck(crate::wire::HelloAck { max_adverts: 2, buffer_bytes: 37, ird: 1, ord: 1 }).emit(
        Base { bufs: 8, ..Base::default() },
        0,
        &mut out,
    );
    machine.receive(&out, None);
    assert!(machine.suspend(4791));
    while machine.poll(true, &mut out).is_some() {}
    out.clear();
    let base = Base { bufs: 8, mseq: Seq(1), ..Base::default() };
    Message::SuspComm { port: 4792 }.emit(base, 0, &mut out);
    machine.receive(&out, None);
    let mut sent = Vec::new();
    while let Some(action) = machine.poll(true, &mut out) {
        sent.push((action, Message::parse(&out).ok().map(|(_, message, _)| message)));
    }
    assert!(
        matches!(sent[..], [(_, Some(Message::SuspCommAck)), (Action::Reconnect { port: 4792 }, _)]),
        "{sent:?}"
    );
    assert!(machine.asks_to_suspend(), "its own is sent again after the new set-up");
}

/// A connecting machine whose Hello was sent.
fn connecting(config: &Config) -> (Machine, Vec<u8>) {
    let (mut machine, hello) = Machine::connect(config);
    let mut out = Vec::new();
    machine.write(b"early");
    while let Some(action) = machine.poll(true, &mut out) {
        assert!(matches!(action, Action::PostReceives { .. }), "sent before the HelloAck: {action:?}");
    }
    (machine, hello)
}

fn hello_ack(ird: u16, bufs: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    let ack = crate::wire::HelloAck { max_adverts: 2, buffer_bytes: 37, ird, ord: 1 };
    Message::HelloAck(ack).emit(Base { bufs, ..Base::default() }, 0, &mut bytes);
    bytes
}

#[test]
fn sdp_s8_1_1_nothing_is_sent_before_the_hello_ack() {
    let (mut machine, _) = connecting(&Config { ord: 9, ..config(3) });
    machine.receive(&hello_ack(4, 3), None);
    assert_eq!((machine.ord(), machine.modes()), (4, (Mode::Combined, Mode::Combined)));
    let mut out = Vec::new();
    let sends = std::iter::from_fn(|| machine.poll(true, &mut out)).any(|a| matches!(a, Action::Send { .. }));
    assert!(sends, "at once afterwards");
}

#[test]
fn sdp_s8_1_1_a_bad_hello_ack_ends_the_set_up() {
    let good = hello_ack(4, 3);
    // MajV, MaxAdverts, LocORD and LocIRD; a count of receives below three.
    let bad = [(16, 0x21), (19, 0), (25, 0), (27, 0), (3, 2)];
    for (at, value) in bad {
        let (mut machine, _) = connecting(&config(3));
        let mut bytes = good.clone();
        bytes[at] = value;
        machine.receive(&bytes, None);
        assert!(matches!(machine.ended(), Some(End::Violated(_))), "byte {at}");
    }
    let (mut machine, _) = connecting(&config(3));
    let mut other_minor = good;
    other_minor[16] = 0x12;
    machine.receive(&other_minor, None);
    assert!(machine.is_open());
}

/// The HelloAck: no flags and numbers of zero, with a solicited event.
#[test]
fn sdp_s8_1_1_the_hello_ack_has_zero_numbers() {
    let (_, hello) = connecting(&config(3));
    let (base, message, _) = Message::parse(&hello).unwrap();
    assert_eq!(base, Base { bufs: 3, ..Base::default() });
    assert!(matches!(message, Message::Hello(_)));
    let mut machine = Machine::accept(&config(3), &hello).unwrap();
    let mut out = Vec::new();
    assert_eq!(
        machine.poll(true, &mut out),
        Some(Action::Send { memory: None, solicited: true, invalidate: None })
    );
    let (base, message, _) = Message::parse(&out).unwrap();
    assert_eq!(base, Base { bufs: 3, ..Base::default() });
    assert!(matches!(message, Message::HelloAck(_)));
}

#[test]
fn sdp_s6_2_settings_are_bounded_in_the_greeting() {
    let wild = Config {
        buffers: 0,
        buffer_bytes: 1,
        most_buffer_bytes: 0,
        desired_bytes: 0,
        max_adverts: 0,
        ird: 0,
        ord: 0,
        ..config(3)
    };
    let (machine, hello) = connecting(&wild);
    let (base, Message::Hello(hello), _) = Message::parse(&hello).unwrap() else { panic!("no Hello") };
    assert_eq!((base.bufs, hello.buffer_bytes, hello.desired_bytes), (3, 37, 37));
    assert_eq!((hello.max_adverts, hello.ird, hello.ord), (1, 1, 1));
    assert_eq!(machine.receives_to_post(), (4, 37));
    let usual = Config::default();
    assert!(usual.buffers > 3 && usual.buffer_bytes > 37);
}

#[test]
fn sdp_s6_2_1_4_receives_are_no_longer_than_the_peer_desires() {
    let usual = Config { buffer_bytes: 4096, most_buffer_bytes: 8192, ..config(3) };
    for (desired_bytes, expected) in [(1000, 1000), (37, 37), (36, 4096), (0, 4096), (1 << 20, 4096)] {
        let hello = Message::Hello(Hello { max_adverts: 1, desired_bytes, buffer_bytes: 64, ird: 1, ord: 1 });
        let mut bytes = Vec::new();
        hello.emit(Base { bufs: 3, ..Base::default() }, 0, &mut bytes);
        let machine = Machine::accept(&usual, &bytes).unwrap();
        assert_eq!(machine.receives_to_post().1, expected, "{desired_bytes}");
    }
}

#[test]
fn sdp_s6_1_2_req_pipe_is_ignored_in_buffered_mode() {
    let mut link = Link::new();
    link.take(mode_change(Mode::Pipelined), NONE, b"");
    link.machine.read_memory(memory(50, 1));
    assert!(link.machine.change_mode(Mode::Buffered));
    link.messages();
    link.take(Message::RdmaWrCompl { len: 50 }, Flags::REQ_PIPE, b"");
    // The sink ends Buffered mode. The hint from before does not count.
    link.take(Message::ModeChange { half: Half::Send, mode: Mode::Combined }, NONE, b"");
    link.machine.write_memory(memory(50, 5));
    assert_eq!(link.machine.modes().0, Mode::Combined);
}

/// RdmaWrCompl reports the preference of its sender as the sink of the other half.
#[test]
fn sdp_s6_3_6_wr_compl_reports_the_preferred_mode() {
    for waits in [true, false] {
        let mut link = pipelined_source();
        if waits {
            link.machine.read_memory(memory(50, 1));
        }
        link.take(sink_avail(11, 0), NONE, b"");
        link.machine.write_memory(memory(30, 5));
        let flags = link.messages().iter().find_map(|(base, message, _)| {
            matches!(message, Message::RdmaWrCompl { .. }).then_some(base.flags)
        });
        assert_eq!(flags, Some(if waits { Flags::REQ_PIPE } else { NONE }));
    }
    // The receiver follows it with its own half, when it sends memory.
    let mut link = pipelined_sink();
    link.machine.read_memory(memory(50, 1));
    link.messages();
    link.take(Message::RdmaWrCompl { len: 50 }, Flags::REQ_PIPE, b"");
    link.machine.write_memory(memory(50, 5));
    assert_eq!(link.machine.modes().0, Mode::Pipelined);
}

#[test]
fn sdp_s6_1_2_req_pipe_is_zero_elsewhere() {
    let mut link = pipelined_sink();
    link.machine.read_memory(memory(50, 1));
    link.machine.write(b"x");
    link.machine.write_memory(memory(50, 5));
    let mut messages = link.messages();
    link.machine.cancel_reads();
    link.machine.cancel_writes();
    messages.extend(link.messages());
    assert!(messages.len() >= 4, "{messages:?}");
    assert!(messages.iter().all(|(base, ..)| !base.flags.contains(Flags::REQ_PIPE)), "{messages:?}");
}

#[test]
fn sdp_s9_2_another_invalidated_key_is_a_violation() {
    for (len, key, violation) in
        [(100, 5, None), (100, 6, Some(Violation::Invalidation)), (50, 5, Some(Violation::Invalidation))]
    {
        let mut link = pipelined_source();
        link.machine.write_memory(memory(100, 5));
        link.messages();
        link.give(link.base(), Message::RdmaRdCompl { len }, b"", Some(key));
        assert_eq!(link.machine.ended(), violation.map(End::Violated), "{len} {key}");
    }
}

/// Bytes instead of memory: a Data message uses up the oldest SinkAvail, the next is written to.
#[test]
fn sdp_s9_5_2_2_data_uses_up_the_oldest_sink_avail() {
    let mut link = pipelined_source();
    link.take(sink_avail(11, 0), NONE, b"");
    link.take(sink_avail(12, 0), NONE, b"");
    link.machine.write(b"x");
    assert_eq!(kinds(&link.messages()), [Message::Data]);
    link.machine.write_memory(memory(30, 5));
    assert!(matches!(link.drive()[0].0, Action::Write { remote, .. } if remote.stag == 12));
}

/// The byte waits behind advertised data, the flag does not; it may use a reserved credit.
#[test]
fn sdp_s9_5_3_oob_pend_passes_a_src_avail() {
    let mut link = Link::new();
    link.machine.write_memory(memory(100, 5));
    assert_eq!(link.messages().len(), 1);
    link.give(Base { bufs: 2, ..link.base() }, Message::Data, b"", None);
    assert!(link.machine.write_oob(b'!'));
    let messages = link.messages();
    assert!(
        matches!(messages[..], [(base, Message::Data, 0)] if base.flags == Flags::OOB_PEND),
        "{messages:?}"
    );
}

#[test]
fn sdp_s9_5_3_oob_pend_makes_the_stream_urgent() {
    let mut link = Link::new();
    link.take(Message::Data, Flags::OOB_PEND, b"");
    assert!(link.machine.is_urgent() && !link.machine.oob_is_next());
    link.take(Message::Data, Flags::OOB_PRES, b"ab!");
    assert_eq!(link.machine.read(&mut [0; 8]), 2);
    assert!(link.machine.oob_is_next());
    assert_eq!(link.machine.take_oob(), Some(b'!'));
    assert!(!link.machine.is_urgent() && !link.machine.oob_is_next());
}

/// A receive into memory that waits ends at an out-of-band byte, so that the next one begins behind it.
#[test]
fn a_receive_into_memory_ends_at_an_out_of_band_byte() {
    let mut link = Link::new();
    link.machine.read_memory(memory(50, 1));
    link.take(Message::Data, Flags::OOB_PRES, b"!");
    link.take(Message::Data, NONE, b"behind");
    assert_eq!(received(&mut link), [(0, 0, Vec::new())]);
    assert!(link.machine.oob_is_next());
}

/// Receives that have grown keep their size over a suspension.
#[test]
fn sdp_s13_1_1_the_size_of_receives_survives() {
    let mut link = Link::with(&Config { most_buffer_bytes: 80, ..config(3) });
    link.take(Message::ChRcvBuf { bytes: 80 }, NONE, b"");
    for _ in 0..6 {
        link.messages();
        link.take(Message::Data, NONE, b"");
    }
    link.messages();
    assert_eq!(link.machine.post_bytes(), 80);
    assert!(link.machine.suspend(4791));
    link.messages();
    link.take(Message::SuspCommAck, NONE, b"");
    let (_, hello) = Machine::connect(&config(3));
    link.machine.resume(&hello).unwrap();
    assert_eq!(link.machine.receives_to_post(), (3, 80));
    link.restart();
    let messages = link.messages();
    assert!(matches!(messages[0].1, Message::HelloAck(ack) if ack.buffer_bytes == 80), "{messages:?}");
}
