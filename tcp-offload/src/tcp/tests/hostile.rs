//! A peer that sends arbitrary segments: nothing panics, no timer spins, the segments sent stay within bounds, and
//! every frame is released.

use proptest::prelude::*;

use super::{iss, plain};
use crate::{
    seq::SeqNum,
    tcp::{
        TcpConfig,
        testing::{IRS, ISS, Script, Stream, ms},
    },
    wire::{Ecn, Fields, Flags, Options, SackBlock, Timestamps},
};

/// Numbers mostly near `base`, sometimes anywhere.
fn near(base: u32) -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => (-2000i32..20_000).prop_map(move |d| base.wrapping_add(d as u32)),
        1 => any::<u32>(),
    ]
}

prop_compose! {
    fn options()(
        sack in proptest::collection::vec((near(ISS), near(ISS)), 0..5),
        timestamps in proptest::option::of((near(0), near(0))),
        mss in proptest::option::weighted(0.1, any::<u16>()),
        window_scale in proptest::option::weighted(0.1, any::<u8>()),
        sack_permitted in prop::bool::weighted(0.1),
    ) -> Options {
        let mut options = Options { mss, window_scale, sack_permitted, ..Options::default() };
        options.timestamps = timestamps.map(|(value, echo)| Timestamps { value, echo });
        // As many blocks as fit 40 bytes of options.
        let room = (40 - options.wire_len()) / 8;
        for (to, (left, right)) in options.sack.iter_mut().zip(sack).take(room.saturating_sub(1)) {
            *to = SackBlock { left: SeqNum::new(left), right: SeqNum::new(right) };
            options.sack_count += 1;
        }
        options
    }
}

prop_compose! {
    fn segment()(
        seq in near(IRS), ack in near(ISS), window: u16, options in options(),
        bits in prop_oneof![4 => Just(0b10000u8), 1 => any::<u8>()],
        ce in prop::bool::weighted(0.1),
        len in 0usize..1400, pause in 0u64..50,
    ) -> (Fields, usize, u64) {
        let bit = |n: u8| bits & (1 << n) != 0;
        let flags = Flags {
            fin: bit(0), syn: bit(1), rst: bit(2) && bit(5), psh: bit(3), ack: bit(4), ece: bit(6), cwr: bit(7),
        };
        let ecn = if ce { Ecn::Ce } else { Ecn::NotEct };
        (Fields { seq: SeqNum::new(seq), ack: SeqNum::new(ack), flags, window, options, ecn }, len, pause)
    }
}

fn check(script: &mut Script) {
    let info = script.conn.info();
    assert!(info.emss >= 256 && info.cwnd >= info.emss as u64);
    assert!(info.in_flight <= script.source.at + 1);
    assert!(info.chunks_retained <= 200);
}

proptest! {
    #[test]
    fn prop_any_segments_do_no_harm(
        segments in proptest::collection::vec(segment(), 1..60),
        start in 0u8..3, sack: bool, timestamps: bool, ecn: bool,
    ) {
        let config = TcpConfig { sack, timestamps, ecn, max_chunks: 200, ..TcpConfig::default() };
        let source = Stream::new(30_000, 700, true);
        let mut script = match start {
            0 => Script::connecting(config, source),
            1 => Script::accepting(config, Options { mss: Some(1200), sack_permitted: true, ..Options::default() }),
            _ => Script::established(config, source),
        };
        for (fields, len, pause) in &segments {
            script.inject_anything(*fields, *len);
            let sent = script.run();
            prop_assert!(sent.len() <= 64);
            script.wait(ms(*pause));
            check(&mut script);
        }
        script.tear_down();
    }

    /// Arbitrary acknowledgments for a stream that we send; afterwards the peer behaves and gets the whole stream.
    #[test]
    fn prop_a_confusing_peer_still_gets_the_whole_stream(
        acks in proptest::collection::vec((0u32..20_000, proptest::collection::vec((0u32..20_000, 1u32..4_000), 0..4), 0u64..30), 0..40),
        sack: bool,
    ) {
        let config = TcpConfig { sack, ..TcpConfig::default() };
        let mut script = Script::established(config, Stream::new(20_000, 0, false));
        script.run();
        for (offset, blocks, pause) in &acks {
            let blocks: Vec<(u32, u32)> = blocks.iter().map(|(left, len)| (*left, left + len)).collect();
            // Acknowledging data that was never sent would be a lie, not confusion: the number stays below SND.NXT.
            let sent = script.source.at as u32;
            script.ack((*offset).min(sent), &blocks);
            script.wait(ms(*pause));
            check(&mut script);
        }
        let mut rounds = 0;
        while script.acked() < 20_000 {
            let all = script.source.at as u32;
            let fields = Fields { ack: iss(all), ..plain(&script) };
            script.exchange(fields, 0);
            script.wait(ms(1));
            rounds += 1;
            prop_assert!(rounds < 200, "stuck at {}", script.acked());
        }
        prop_assert_eq!(script.conn.info().chunks_retained, 0);
        script.tear_down();
    }
}
