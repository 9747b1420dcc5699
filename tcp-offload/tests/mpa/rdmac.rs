//! RFC 5044 appendix C: start-up with RNICs of the RDMA Consortium, whose frames are given here byte by byte, and each
//! cell of figures 15, 16 and 17.

use xwarp_tcp::{
    framing::{self, UNNEGOTIATED},
    mpa::{Agreed, Markers, MpaConfig, MpaError, RequestRevision, Revision},
    ulp::Event,
};

use crate::support::{End, Reference, connect, ulpdus};

const MARKERS: [Markers; 3] = [Markers::Prefer, Markers::Require, Markers::Off];

/// Start-up frames of an RDMAC RNIC: revision 0, M and C.
const REQUEST: &[u8] = b"MPA ID Req Frame\xc0\x00\x00\x02hi";
const REPLY: &[u8] = b"MPA ID Rep Frame\xc0\x00\x00\x03you";

fn config(markers: Markers, permissive: bool) -> MpaConfig {
    MpaConfig { markers, permissive, crc: false, revision: RequestRevision::One, ..MpaConfig::default() }
}

/// Checks that V=0, M=1/1 and CRC were negotiated, the only possible result with an RDMAC RNIC.
fn assert_rdmac(agreed: Agreed) {
    assert_eq!(agreed.revision, Revision::Zero);
    assert!(agreed.markers_sent && agreed.markers_received && agreed.crc && !agreed.peer_to_peer);
    assert_eq!((agreed.peer_ird, agreed.peer_ord), (UNNEGOTIATED, UNNEGOTIATED));
}

/// Exchanges FPDUs with markers and CRC in both directions.
fn exchange(end: &mut End) {
    let data = ulpdus(&[20, 700, 1400]);
    let stream = Reference::new(&data, true, true).bytes;
    let start = end.contiguous;
    assert!(end.receive(start, &stream));
    assert_eq!(end.ulp.delivered, data);
    let before = end.sent.len();
    end.ulp.to_send = data.into();
    end.fill_all(1448);
    assert!(end.sent[before..] == stream);
}

/// Figures 15 and 16, first row.
#[test]
fn rfc5044_c2_4_a_permissive_responder_answers_an_rdmac_initiator_with_revision_0() {
    for markers in MARKERS {
        let mut end = End::responder(config(markers, true));
        assert!(end.receive(0, REQUEST));
        let [Event::Requested { offer: framing::Offer::Mpa(offer), .. }] = &end.ulp.events[..] else {
            panic!("not requested")
        };
        assert_eq!((offer.revision, &offer.private_data[..]), (Revision::Zero, &b"hi"[..]));
        end.accept();
        end.fill_all(1448);
        assert_eq!(end.sent, b"MPA ID Rep Frame\xc0\x00\x00\x07welcome", "M=1 whatever is preferred");
        assert_rdmac(end.ulp.established().unwrap());
        exchange(&mut end);

        let mut end = End::responder(config(markers, false));
        assert!(end.receive(0, REQUEST));
        assert_eq!(end.session.failed(), Some(MpaError::UnsupportedRevision(0).into()), "closed");
        assert!(end.ulp.events.is_empty());
    }
}

/// Figures 15 and 16, first column.
#[test]
fn rfc5044_c2_5_a_permissive_initiator_follows_an_rdmac_responder() {
    for markers in MARKERS {
        let mut end = End::initiator(config(markers, true));
        end.fill_all(1448);
        assert_eq!(end.sent[16..18], [if markers == Markers::Off { 0 } else { 0x80 }, 1]);
        assert!(end.receive(0, REPLY));
        let [Event::Established { private_data, .. }] = &end.ulp.events[..] else { panic!("no") };
        assert_eq!(private_data, b"you");
        assert_rdmac(end.ulp.established().unwrap());
        exchange(&mut end);

        let mut end = End::initiator(config(markers, false));
        end.fill_all(1448);
        assert!(end.receive(0, REPLY));
        assert_eq!(end.session.failed(), Some(MpaError::UnsupportedRevision(0).into()), "closed");
    }
}

/// An RDMAC RNIC mistakes IRD and ORD of a request of revision 2 for private data. The start-up therefore fails, and
/// the initiator can try again with revision 1.
#[test]
fn rfc5044_c2_5_an_enhanced_request_is_not_completed_by_revision_0() {
    for revision in [RequestRevision::PreferTwo, RequestRevision::RequireTwo] {
        let mut end = End::initiator(MpaConfig { revision, ..config(Markers::Prefer, true) });
        end.fill_all(1448);
        assert!(end.receive(0, REPLY));
        assert_eq!(end.session.failed(), Some(MpaError::NotEnhanced.into()));
    }
}

/// Figure 17: between IETF RNICs, permissive or not, the version is 1 and each direction has its own markers.
#[test]
fn rfc5044_c3_a_permissive_rnic_changes_nothing_between_ietf_rnics() {
    for (ours, theirs) in MARKERS.into_iter().flat_map(|ours| MARKERS.map(|theirs| (ours, theirs))) {
        for (we, they) in [(false, false), (false, true), (true, false), (true, true)] {
            let (initiator, responder) =
                connect(End::initiator(config(ours, we)), End::responder(config(theirs, they)));
            let agreed = initiator.ulp.established().unwrap();
            assert_eq!(agreed.revision, Revision::One);
            let asks = ours != Markers::Off;
            let answers = theirs == Markers::Require || theirs == Markers::Prefer && asks;
            assert_eq!((agreed.markers_received, agreed.markers_sent), (asks, answers));
            assert_eq!(responder.ulp.established().unwrap().revision, Revision::One);
            assert_eq!(initiator.sent[17], 1);
            assert_eq!(responder.sent[17], 1);
        }
    }
}

/// Figure 14: RDMAC RNICs always ask for markers and CRC.
#[test]
fn rfc5044_c1_a_frame_of_revision_0_without_markers_or_crc_is_rejected() {
    for flags in [0, 0x40, 0x80] {
        let with = |frame: &[u8], flags| [&frame[..16], &[flags], &frame[17..]].concat();
        let mut end = End::responder(config(Markers::Prefer, true));
        assert!(end.receive(0, &with(REQUEST, flags)));
        assert_eq!(end.session.failed(), Some(MpaError::NotRdmac.into()));
        let mut end = End::initiator(config(Markers::Prefer, true));
        end.fill_all(1448);
        assert!(end.receive(0, &with(REPLY, flags)));
        assert_eq!(end.session.failed(), Some(MpaError::NotRdmac.into()));
        // In a rejection, the two bits have no effect.
        let mut end = End::initiator(config(Markers::Prefer, true));
        end.fill_all(1448);
        assert!(end.receive(0, &with(REPLY, flags | 0x20)));
        let rejected =
            Event::Rejected { private_data: b"you".to_vec(), ird: UNNEGOTIATED, ord: UNNEGOTIATED };
        assert_eq!(end.ulp.events, [rejected]);
    }
}

/// The rejection of a request of an RDMAC RNIC also has revision 0.
#[test]
fn rfc5044_c2_4_a_rejection_of_an_rdmac_initiator() {
    let mut end = End::responder(config(Markers::Off, true));
    assert!(end.receive(0, REQUEST));
    end.session.reject(b"no").unwrap();
    end.fill_all(1448);
    assert_eq!(end.sent, b"MPA ID Rep Frame\xe0\x00\x00\x02no");
}
