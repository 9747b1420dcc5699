//! Start-up: RFC 5044 section 7.1 and RFC 6581 sections 9 and 10.

use std::time::Duration;

use proptest::prelude::*;
use xwarp_tcp::{
    framing::{self, AcceptParams, SetupError, UNNEGOTIATED},
    mpa::{
        Agreed, Enhanced, Markers, MpaConfig, MpaError, MpaReply, MpaRequest, RequestRevision, Revision, Rtr,
        RtrOptions, Session,
    },
    tcp::Filled,
    time::Instant,
    ulp::Event,
};

use crate::support::{CONN, End, LISTENER, connect, path, ulpdus};

fn request() -> MpaRequest {
    let enhanced = Some(Enhanced { ird: 16, ord: 8, peer_to_peer: None });
    MpaRequest { revision: 2, crc: true, enhanced, ..MpaRequest::default() }
}

fn reply() -> MpaReply {
    let enhanced = Some(Enhanced { ird: 16, ord: 8, peer_to_peer: None });
    MpaReply { revision: 2, crc: true, enhanced, ..MpaReply::default() }
}

/// An initiator that has sent its request.
fn asking(config: MpaConfig) -> End {
    let mut end = End::initiator(config);
    assert_eq!(end.fill_all(1448).len(), 1);
    end
}

/// An initiator that has received `reply`.
fn replied(config: MpaConfig, reply: &MpaReply) -> End {
    let mut end = asking(config);
    assert!(end.receive(0, &reply.emit()));
    end
}

/// A responder that has accepted `request` with `ird` and `ord`, and its reply.
fn accepted(config: MpaConfig, request: &MpaRequest, ird: u16, ord: u16) -> (End, MpaReply) {
    let mut end = End::responder(config);
    assert!(end.receive(0, &request.emit()));
    let params = AcceptParams { ird, ord, private_data: b"yes".to_vec() };
    end.session.accept(&mut end.ulp, CONN, &path(), params).unwrap();
    end.fill_all(1448);
    let (reply, len) = MpaReply::parse(&end.sent).unwrap().unwrap();
    assert_eq!(len, end.sent.len());
    (end, reply)
}

#[test]
fn rfc5044_s7_1_2_request_reply_and_events() {
    let (initiator, responder) =
        connect(End::initiator(MpaConfig::default()), End::responder(MpaConfig::default()));
    let [
        Event::Requested { listener, offer: framing::Offer::Mpa(offer), .. },
        Event::Established { agreed: framing::Agreed::Mpa(theirs), .. },
    ] = &responder.ulp.events[..]
    else {
        panic!("{:?}", responder.ulp.events)
    };
    assert_eq!((*listener, &offer.private_data[..]), (LISTENER, &b"hello"[..]));
    assert_eq!((offer.ird, offer.ord, offer.revision), (16, 8, Revision::Two));
    let [Event::Established { agreed: framing::Agreed::Mpa(ours), private_data, .. }] =
        &initiator.ulp.events[..]
    else {
        panic!("{:?}", initiator.ulp.events)
    };
    assert_eq!(private_data, b"welcome");
    assert!(ours.crc && ours.markers_sent && ours.markers_received, "the defaults of both ends");
    assert_eq!((ours.ird, ours.ord), (16, 8), "16 bounds the responder's 4; 8 is within its 32");
    assert_eq!((theirs.ird, theirs.ord), (32, 4));
    assert_eq!((ours.peer_ird, ours.peer_ord), (32, 4));
    assert_eq!((theirs.peer_ird, theirs.peer_ord), (16, 8));
    assert_eq!((initiator.link.lent(), responder.link.lent()), (0, 0));
}

proptest! {
    /// Start-up frames arrive in any pieces and order, and the first FPDUs right after the reply or before it.
    #[test]
    fn prop_startup_frames_may_arrive_in_any_order_and_pieces(
        cuts in proptest::collection::vec(1usize..9, 1..4), seed: u64, crc: bool, markers: bool,
    ) {
        let config = MpaConfig {
            crc,
            markers: if markers { Markers::Require } else { Markers::Off },
            ..MpaConfig::default()
        };
        let mut initiator = End::initiator(config.clone());
        let mut responder = End::responder(config);
        let request = initiator.fill_all(1448).concat();
        scatter(&mut responder, 0, &request, &cuts, seed);
        responder.accept();
        let mut stream = responder.fill_all(1448).concat();
        // The responder must not send the first FPDU, but a lax peer sends FPDUs right after its reply.
        let data = ulpdus(&[20, 700, 3]);
        stream.extend_from_slice(&crate::support::Reference::new(&data, markers, crc).bytes);
        scatter(&mut initiator, 0, &stream, &cuts, seed);
        prop_assert!(initiator.ulp.established().is_some());
        prop_assert_eq!(&initiator.ulp.delivered, &data);
        prop_assert_eq!((initiator.link.lent(), responder.link.lent()), (0, 0));
    }

    #[test]
    fn prop_startup_junk_ends_in_failure_or_waiting(bytes: Vec<u8>, keyed: bool, initiates: bool) {
        let mut end =
            if initiates { asking(MpaConfig::default()) } else { End::responder(MpaConfig::default()) };
        let key: &[u8] = if initiates { b"MPA ID Rep Frame" } else { b"MPA ID Req Frame" };
        let frame = if keyed { [key, &bytes[..]].concat() } else { bytes };
        end.receive(0, &frame);
        if end.session.failed().is_some() {
            end.session.release(&mut end.link);
            prop_assert_eq!(end.link.lent(), 0);
        }
    }
}

/// Delivers `stream` from `offset` on in pieces of a few sizes, in an order drawn from `seed`.
fn scatter(end: &mut End, offset: usize, stream: &[u8], cuts: &[usize], mut seed: u64) {
    let mut pieces = Vec::new();
    let (mut at, mut n) = (0, 0);
    while at < stream.len() {
        let len = (cuts[n % cuts.len()] * 17).min(stream.len() - at);
        pieces.push((offset + at, &stream[at..at + len]));
        (at, n) = (at + len, n + 1);
    }
    while !pieces.is_empty() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (offset, bytes) = pieces.swap_remove((seed >> 33) as usize % pieces.len());
        assert!(end.receive(offset, bytes));
    }
}

#[test]
fn rfc5044_s7_1_1_crc_is_used_when_either_side_asks() {
    for (ours, theirs, expected) in [(true, false, true), (false, true, true), (false, false, false)] {
        let config = |crc| MpaConfig { crc, ..MpaConfig::default() };
        let (initiator, responder) = connect(End::initiator(config(ours)), End::responder(config(theirs)));
        assert_eq!(initiator.ulp.established().unwrap().crc, expected);
        assert_eq!(responder.ulp.established().unwrap().crc, expected);
    }
}

#[test]
fn rfc5044_s7_1_1_each_direction_has_its_own_markers() {
    for (ours, theirs, to_us, to_them) in [
        (Markers::Prefer, Markers::Prefer, true, true),
        (Markers::Prefer, Markers::Off, true, false),
        (Markers::Off, Markers::Prefer, false, false),
        (Markers::Off, Markers::Require, false, true),
        (Markers::Require, Markers::Off, true, false),
    ] {
        let config = |markers| MpaConfig { markers, ..MpaConfig::default() };
        let (mut initiator, mut responder) =
            connect(End::initiator(config(ours)), End::responder(config(theirs)));
        let agreed = initiator.ulp.established().unwrap();
        assert_eq!((agreed.markers_received, agreed.markers_sent), (to_us, to_them));
        let agreed = responder.ulp.established().unwrap();
        assert_eq!((agreed.markers_sent, agreed.markers_received), (to_us, to_them));
        let data = ulpdus(&[600, 40]);
        for (from, to) in [(&mut initiator, &mut responder)] {
            from.ulp.to_send = data.clone().into();
            for segment in from.fill_all(1448) {
                to.receive(to.contiguous, &segment);
            }
            assert_eq!(to.ulp.delivered, data);
        }
    }
}

#[test]
fn rfc5044_s7_1_2_rule_4_responder_waits_for_the_first_fpdu() {
    let (mut initiator, mut responder) =
        connect(End::initiator(MpaConfig::default()), End::responder(MpaConfig::default()));
    responder.ulp.to_send = ulpdus(&[30]).into();
    assert_eq!(responder.fill(1448, 1448), Err(Filled::Nothing));
    initiator.ulp.to_send = ulpdus(&[30]).into();
    let segment = initiator.fill(1448, 1448).unwrap();
    let offset = responder.contiguous;
    responder.receive(offset, &segment[..10]);
    assert_eq!(responder.fill(1448, 1448), Err(Filled::Nothing), "not before the FPDU is complete");
    responder.receive(offset + 10, &segment[10..]);
    assert!(responder.fill(1448, 1448).is_ok());
}

#[test]
fn rfc5044_s7_1_2_rule_8_same_role_and_time_limits() {
    let mut end = asking(MpaConfig::default());
    end.receive(0, &request().emit());
    assert_eq!(end.session.failed(), Some(MpaError::SameRole.into()));

    let mut end = End::responder(MpaConfig::default());
    let limit = Instant::ZERO + MpaConfig::default().startup_timeout;
    assert_eq!(end.session.deadline(), Some(limit));
    end.now = limit - Duration::from_nanos(1);
    end.on_timer();
    assert_eq!(end.session.failed(), None);
    end.now = limit;
    end.on_timer();
    assert_eq!(end.session.failed(), Some(MpaError::StartupTimeout.into()));

    // An initiator's time limit begins with its request, not with its SYN.
    let mut end = End::initiator(MpaConfig::default());
    assert_eq!(end.session.deadline(), None);
    end.now = Instant::from_nanos(5);
    end.fill_all(1448);
    let limit = Instant::from_nanos(5) + MpaConfig::default().startup_timeout;
    assert_eq!(end.session.deadline(), Some(limit));
    end.receive(0, &reply().emit());
    assert_eq!(end.session.deadline(), None);
}

#[test]
fn rfc5044_s7_1_2_data_before_the_reply_ends_the_connection() {
    let mut bytes = request().emit();
    bytes.push(0);
    let mut end = End::responder(MpaConfig::default());
    end.receive(0, &bytes);
    assert_eq!(end.session.failed(), Some(MpaError::DataBeforeReply.into()));
    assert!(end.ulp.events.is_empty());

    let mut end = End::responder(MpaConfig::default());
    end.receive(0, &request().emit());
    let offset = end.contiguous;
    end.receive(offset, &[0]);
    assert_eq!(end.session.failed(), Some(MpaError::DataBeforeReply.into()));
    assert_eq!(end.link.lent(), 0);
}

#[test]
fn rfc5044_s7_1_2_peer_closes_during_startup() {
    for mut end in [asking(MpaConfig::default()), End::responder(MpaConfig::default())] {
        end.peer_closed();
        assert_eq!(end.session.failed(), Some(MpaError::Truncated.into()));
        assert!(end.ulp.events.is_empty());
    }
}

#[test]
fn rfc5044_s7_1_2_rejection_carries_private_data_and_closes() {
    let config = MpaConfig { markers: Markers::Off, ..MpaConfig::default() };
    let mut responder = End::responder(config.clone());
    let mut initiator = End::initiator(config);
    let request = initiator.fill_all(1448).concat();
    responder.receive(0, &request);
    assert_eq!(
        responder.session.reject(&[0; 253]).unwrap_err(),
        SetupError::PrivateDataTooLong { len: 253, limit: 252 }
    );
    responder.session.reject(b"full").unwrap();
    assert_eq!(responder.session.reject(b"").unwrap_err(), SetupError::NoRequest);
    let reply = responder.fill_all(1448).concat();
    assert_eq!(responder.fill(1448, 1448), Err(Filled::Finish));
    initiator.receive(0, &reply);
    let expected = Event::Rejected { private_data: b"full".to_vec(), ird: 0, ord: 0 };
    assert_eq!(initiator.ulp.events, [expected]);
    assert_eq!(initiator.session.failed(), None);
    assert_eq!(initiator.fill(1448, 1448), Err(Filled::Finish));
}

#[test]
fn rfc6581_s9_1_a_rejection_reports_ird_and_ord() {
    let enhanced = Some(Enhanced { ird: 3, ord: 99, peer_to_peer: None });
    let end = replied(MpaConfig::default(), &MpaReply { rejected: true, markers: true, enhanced, ..reply() });
    assert_eq!(end.ulp.events, [Event::Rejected { private_data: Vec::new(), ird: 3, ord: 99 }]);
}

/// Linux's siw, which has no markers, rejects a request for them with R set, M clear and no private data.
#[test]
fn rfc5044_s7_1_1_a_refusal_of_markers_is_distinguished_from_a_rejection() {
    let no = MpaReply { rejected: true, ..reply() };
    let end = replied(MpaConfig::default(), &no);
    assert_eq!(end.session.failed(), Some(MpaError::MarkersRefused.into()));
    assert!(end.ulp.events.is_empty());
    for (markers, private_data) in [(true, &b""[..]), (false, b"full")] {
        let private_data = private_data.to_vec();
        let end = replied(MpaConfig::default(), &MpaReply { markers, private_data, ..no.clone() });
        assert!(matches!(end.ulp.events[..], [Event::Rejected { .. }]));
    }
    let end = replied(MpaConfig { markers: Markers::Off, ..MpaConfig::default() }, &no);
    assert!(matches!(end.ulp.events[..], [Event::Rejected { .. }]));
}

#[test]
fn rfc6581_s9_1_responder_ord_is_at_most_the_initiators_ird() {
    let (end, reply) = accepted(MpaConfig::default(), &request(), 32, 100);
    let agreed = end.ulp.established().unwrap();
    assert_eq!((agreed.ird, agreed.ord), (32, 16));
    let declared = reply.enhanced.unwrap();
    assert_eq!((declared.ird, declared.ord), (32, 16));
}

#[test]
fn rfc6581_s9_1_depths_left_to_the_ulps_stay_unchanged() {
    let enhanced = Some(Enhanced { ird: UNNEGOTIATED, ord: UNNEGOTIATED, peer_to_peer: None });
    let (end, reply) = accepted(MpaConfig::default(), &MpaRequest { enhanced, ..request() }, 5, 100);
    let agreed = end.ulp.established().unwrap();
    assert_eq!((agreed.ird, agreed.ord), (5, 100));
    assert_eq!(reply.enhanced, enhanced);

    let end = replied(MpaConfig::default(), &reply);
    let agreed = end.ulp.established().unwrap();
    assert_eq!((agreed.ird, agreed.ord), (16, 8));
}

#[test]
fn rfc6581_s9_1_initiator_follows_the_responder() {
    let answer = |ird, ord| MpaReply { enhanced: Some(Enhanced { ird, ord, peer_to_peer: None }), ..reply() };
    for (ird, ord, our_ird, our_ord) in [(4, 2, 16, 4), (8, 16, 16, 8), (0, 128, 128, 0)] {
        let end = replied(MpaConfig::default(), &answer(ird, ord));
        let agreed = end.ulp.established().unwrap();
        assert_eq!((agreed.ird, agreed.ord), (our_ird, our_ord));
        assert_eq!((agreed.peer_ird, agreed.peer_ord), (ird, ord));
    }
    // More than we can serve: a Terminate is sent, with layer 2, type 0, code 6.
    let mut end = replied(MpaConfig::default(), &answer(4, 129));
    assert!(matches!(end.ulp.events[0], Event::Disagreed(_)));
    assert_eq!(end.ulp.events[1..], [Event::StreamError(MpaError::InsufficientIrd.into())]);
    let code = MpaError::InsufficientIrd.terminate_code();
    assert_eq!((code.layer, code.error_type, code.code), (2, 0, 6));
    end.ulp.to_send = ulpdus(&[22]).into();
    assert!(end.fill(1448, 1448).is_ok());
}

#[test]
fn rfc6581_s10_unenhanced_requests_get_unenhanced_replies() {
    for revision in [1, 2] {
        let request = MpaRequest { revision, enhanced: None, ..request() };
        let (end, reply) = accepted(MpaConfig::default(), &request, 5, 6);
        assert_eq!((reply.revision, reply.enhanced), (revision, None));
        let agreed = end.ulp.established().unwrap();
        assert_eq!((agreed.ird, agreed.ord, agreed.peer_ird), (5, 6, UNNEGOTIATED));
        assert!(matches!(&end.ulp.events[0], Event::Requested { offer: framing::Offer::Mpa(offer), .. }
            if offer.ird == UNNEGOTIATED && !offer.enhanced));
    }
    let config = MpaConfig { revision: RequestRevision::One, ..MpaConfig::default() };
    let (initiator, _) = connect(End::initiator(config), End::responder(MpaConfig::default()));
    assert_eq!(
        initiator.sent[16..20],
        [0xc0, 1, 0, 5],
        "S is clear, and there is only the application's data"
    );
    let agreed = initiator.ulp.established().unwrap();
    assert_eq!((agreed.revision, agreed.peer_ord), (Revision::One, UNNEGOTIATED));
    assert_eq!((agreed.ird, agreed.ord), (16, 8), "left to the ULPs: our own values apply");
}

#[test]
fn rfc6581_s10_an_unenhanced_reply_to_an_enhanced_request_fails() {
    for revision in [1, 2] {
        let end = replied(MpaConfig::default(), &MpaReply { revision, enhanced: None, ..reply() });
        assert_eq!(end.session.failed(), Some(MpaError::NotEnhanced.into()));
    }
}

#[test]
fn rfc6581_s9_2_the_responder_accepts_the_offered_rtrs() {
    let some = RtrOptions { send: false, write: true, read: true };
    let all = RtrOptions { send: true, write: true, read: true };
    let none = RtrOptions::default();
    for (asked, expected) in [(Some(some), Some(some)), (Some(none), Some(all)), (None, None)] {
        let enhanced = Some(Enhanced { ird: 16, ord: 8, peer_to_peer: asked });
        let (end, reply) = accepted(MpaConfig::default(), &MpaRequest { enhanced, ..request() }, 0, 0);
        assert_eq!(reply.enhanced.unwrap().peer_to_peer, expected);
        let agreed = end.ulp.established().unwrap();
        assert_eq!(agreed.peer_to_peer, asked.is_some());
        assert_eq!(agreed.ird, u16::from(asked.is_some()), "a Read as RTR needs an IRD");
    }
}

#[test]
fn rfc6581_s9_2_initiator_sends_the_first_rtr_that_both_support() {
    let config = |rtrs: &[Rtr]| MpaConfig { peer_to_peer: rtrs.to_vec(), ..MpaConfig::default() };
    let answer =
        |peer_to_peer| MpaReply { enhanced: Some(Enhanced { ird: 16, ord: 8, peer_to_peer }), ..reply() };
    let write = RtrOptions { write: true, ..RtrOptions::default() };
    let end = replied(config(&[Rtr::Read, Rtr::Write]), &answer(Some(write)));
    let [
        Event::Established {
            agreed: framing::Agreed::Mpa(agreed @ Agreed { rtr: Some(Rtr::Write), .. }),
            ..
        },
    ] = &end.ulp.events[..]
    else {
        panic!("{:?}", end.ulp.events)
    };
    assert!(agreed.peer_to_peer);
    assert_eq!(end.sent[20..24], [0x80, 16, 0xc0, 8], "A; no B; C and D");

    // A responder that does not know the model ends the connection only if the initiator requires it.
    let required = MpaConfig { revision: RequestRevision::RequireTwo, ..config(&[Rtr::Read]) };
    for (config, answered) in [(config(&[Rtr::Read]), Some(write)), (required, None)] {
        let end = replied(config, &answer(answered));
        assert_eq!(end.ulp.events[1..], [Event::StreamError(MpaError::NoMatchingRtr.into())]);
    }
    let end = replied(config(&[Rtr::Read]), &answer(None));
    let agreed = end.ulp.established().unwrap();
    assert_eq!((agreed.peer_to_peer, agreed.rtr), (false, None));
    // Flags that were not requested are ignored.
    let end = replied(config(&[]), &answer(Some(write)));
    assert!(!end.ulp.established().unwrap().peer_to_peer);
}

#[test]
fn rfc6581_s9_2_a_bare_fpdu_as_rtr_is_an_empty_ulpdu_to_the_upper_layer() {
    let config = MpaConfig { peer_to_peer: vec![Rtr::EmptyFpdu], ..MpaConfig::default() };
    let (mut initiator, mut responder) =
        connect(End::initiator(config), End::responder(MpaConfig::default()));
    assert!(matches!(
        &initiator.ulp.events[..],
        [Event::Established { agreed: framing::Agreed::Mpa(Agreed { rtr: Some(Rtr::EmptyFpdu), .. }), .. }]
    ));
    responder.ulp.to_send = ulpdus(&[30]).into();
    assert_eq!(responder.fill(1448, 1448), Err(Filled::Nothing));
    initiator.ulp.to_send = [Vec::new(), vec![5; 5]].into();
    let segment = initiator.fill(1448, 1448).unwrap();
    let offset = responder.contiguous;
    responder.receive(offset, &segment);
    assert_eq!(responder.ulp.delivered, [Vec::new(), vec![5; 5]]);
    assert!(responder.fill(1448, 1448).is_ok());
}

#[test]
fn rfc6581_s9_caller_errors() {
    let start = |config: MpaConfig, len, ird| {
        Session::<()>::initiator(config, vec![0; len], ird, 0).map(|_| ()).unwrap_err()
    };
    let one = MpaConfig { revision: RequestRevision::One, ..MpaConfig::default() };
    let two = MpaConfig::default();
    assert_eq!(start(two.clone(), 253, 0), SetupError::PrivateDataTooLong { len: 253, limit: 252 });
    assert_eq!(start(one.clone(), 257, 0), SetupError::PrivateDataTooLong { len: 257, limit: 256 });
    // A caller who raises the limit may send as much as RFC 5044 section 7.1.1 allows, and not more.
    let all = MpaConfig { private_data_bytes: 9999, ..two.clone() };
    assert_eq!(start(all.clone(), 509, 0), SetupError::PrivateDataTooLong { len: 509, limit: 508 });
    assert!(Session::<()>::initiator(all, vec![0; 508], 0, 0).is_ok());
    assert_eq!(start(two, 0, 0x4000), SetupError::ReadDepth(0x4000));
    let one = MpaConfig { peer_to_peer: vec![Rtr::Send], ..one };
    assert_eq!(start(one, 0, 0), SetupError::PeerToPeerNeedsRevisionTwo);
    let mut end = End::responder(MpaConfig::default());
    let accept = end.session.accept(&mut end.ulp, CONN, &path(), AcceptParams::default());
    assert_eq!(accept.unwrap_err(), SetupError::NoRequest);
}

/// An extension of this project, by reserved bits of the flags. Linux's siw answers with the flags of the request.
#[test]
fn sends_with_immediate_data_need_an_offer_and_an_agreement() {
    let with = |send_immediate| MpaConfig { send_immediate, ..MpaConfig::default() };
    let agreed = |end: &End| end.ulp.established().unwrap().send_immediate;
    for (offered, granted) in [(true, true), (true, false), (false, true), (false, false)] {
        let offer = MpaRequest { send_immediate: offered, ..request() };
        let (responder, reply) = accepted(with(granted), &offer, 4, 4);
        let both = offered && granted;
        assert_eq!((agreed(&responder), reply.send_immediate), (both, both));
        let initiator = replied(with(offered), &MpaReply { send_immediate: granted, ..reply });
        assert_eq!(agreed(&initiator), both);
    }
    // The offer, which a siw echoes, and the bit of its own FPDUs of several segments.
    for bits in [0x01, 0x08] {
        let mut bytes = reply().emit();
        bytes[16] |= bits;
        let (echoed, _) = MpaReply::parse(&bytes).unwrap().unwrap();
        assert!(!agreed(&replied(MpaConfig::default(), &echoed)));
    }
    let mut bytes = request().emit();
    bytes[16] |= 0x08;
    let (of_siw, _) = MpaRequest::parse(&bytes).unwrap().unwrap();
    assert!(!accepted(MpaConfig::default(), &of_siw, 4, 4).1.send_immediate);
    assert_eq!(MpaRequest { send_immediate: true, ..request() }.emit()[16] & 0x08, 0);
    // Revision 1 has no extensions.
    let old = MpaRequest { revision: 1, enhanced: None, ..request() };
    assert!(!accepted(MpaConfig::default(), &old, 4, 4).1.send_immediate);
}
