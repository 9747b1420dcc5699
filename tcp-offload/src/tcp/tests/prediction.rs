//! Header prediction has the outcome of the general rules: two connections get the same segments, one of them without
//! prediction.

use proptest::prelude::*;

use super::{bulk, irs, iss, silent, unprobed};
use crate::{
    link::QueueId,
    tcp::{
        Receipt, TcpConfig,
        testing::{Script, Stream, ms, path, us, with_fast_paths},
    },
    wire::{Ecn, Fields, Flags, Mac, Options, SackBlock, Segment, Timestamps, VlanTags},
};

/// What the peer or the time does.
#[derive(Debug, Clone)]
enum Step {
    /// A segment of the peer: `behind` bytes before or after its next one, an acknowledgment `unacked` bytes below all that we
    /// sent, and what is unusual about it.
    Segment { behind: i32, len: usize, unacked: u32, oddity: Oddity },
    /// Time passes and timers fire.
    Wait(u64),
}

#[derive(Debug, Clone, Copy)]
enum Oddity {
    None,
    Push,
    Flags(Flags),
    Window(u16),
    OldStamp,
    NoStamp,
    Sack(u32, u32),
    Congested,
}

fn oddity() -> impl Strategy<Value = Oddity> {
    let flag = |set: fn(&mut Flags)| {
        let mut flags = Flags { ack: true, ..Flags::default() };
        set(&mut flags);
        Just(Oddity::Flags(flags))
    };
    prop_oneof![
        12 => Just(Oddity::None),
        4 => Just(Oddity::Push),
        1 => flag(|flags| flags.ece = true),
        1 => flag(|flags| flags.cwr = true),
        1 => flag(|flags| flags.fin = true),
        1 => flag(|flags| flags.syn = true),
        1 => flag(|flags| flags.rst = true),
        1 => flag(|flags| flags.ack = false),
        2 => any::<u16>().prop_map(Oddity::Window),
        1 => Just(Oddity::OldStamp),
        1 => Just(Oddity::NoStamp),
        2 => (0u32..20_000, 1u32..3000).prop_map(|(left, len)| Oddity::Sack(left, left + len)),
        1 => Just(Oddity::Congested),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let behind = prop_oneof![8 => Just(0), 1 => -2000..3000];
    let len = prop_oneof![2 => Just(0usize), 4 => 1usize..1000];
    let unacked = prop_oneof![4 => Just(0u32), 2 => 0u32..5000, 1 => Just(u32::MAX)];
    prop_oneof![
        8 => (behind, len, unacked, oddity())
            .prop_map(|(behind, len, unacked, oddity)| Step::Segment { behind, len, unacked, oddity }),
        1 => (0u64..400_000).prop_map(Step::Wait),
    ]
}

/// A connection with data to send, and the numbers of its peer.
struct Twin {
    script: Script,
    predict: bool,
    stamps: bool,
    /// End of what the peer has sent in order, and of what the connection has sent, as offsets.
    peer: u32,
    sent: u32,
}

impl Twin {
    fn new(predict: bool, stamps: bool, ecn: bool, source: Stream) -> Self {
        let config = TcpConfig { ecn, ..unprobed() };
        let script = with_fast_paths(predict, || {
            let mut script = Script::connecting(config, source);
            script.run();
            let timestamps = stamps.then_some(Timestamps { value: 100, echo: 0 });
            let options = Options { mss: Some(1000), sack_permitted: true, timestamps, ..Options::default() };
            script.template.flags.ece = ecn;
            script.now += ms(1);
            let flags = Flags { syn: true, ack: true, ece: ecn, ..Flags::default() };
            script.inject(Fields { seq: irs(0).sub(1), flags, options, ..script.template }, 0);
            script.template.flags.ece = false;
            script
        });
        let mut twin = Self { script, predict, stamps, peer: 0, sent: 0 };
        twin.run();
        twin
    }

    fn run(&mut self) -> Vec<Segment> {
        let sent = with_fast_paths(self.predict, || self.script.run());
        for segment in &sent {
            let end = segment.seq.since(iss(0)) as u32 + segment.payload_len as u32;
            self.sent = self.sent.max(end);
        }
        sent
    }

    /// Takes a step. Returns what the connection has answered.
    fn take(&mut self, step: &Step) -> (Receipt, Vec<Segment>, Vec<(u64, Segment)>) {
        self.script.now += us(20);
        match *step {
            Step::Wait(time) => {
                let seen = with_fast_paths(self.predict, || self.script.wait(us(time)));
                (Receipt::default(), self.run(), seen)
            }
            Step::Segment { behind, len, unacked, oddity } => {
                let stamp = 100 + self.script.now.as_nanos().div_euclid(1_000_000) as u32;
                let mut fields = Fields {
                    seq: irs(self.peer.wrapping_add_signed(-behind)),
                    ack: iss(self.sent.saturating_sub(unacked)),
                    ..self.script.template
                };
                fields.options.timestamps = self.stamps.then_some(Timestamps { value: stamp, echo: stamp });
                match oddity {
                    Oddity::None => {}
                    Oddity::Push => fields.flags.psh = true,
                    Oddity::Flags(flags) => fields.flags = flags,
                    Oddity::Window(window) => fields.window = window,
                    Oddity::OldStamp => {
                        fields.options.timestamps = self.stamps.then_some(Timestamps { value: 1, echo: 1 });
                    }
                    Oddity::NoStamp => fields.options.timestamps = None,
                    Oddity::Sack(left, right) => {
                        fields.options.sack[0] = SackBlock { left: iss(left), right: iss(right) };
                        fields.options.sack_count = 1;
                    }
                    Oddity::Congested => fields.ecn = Ecn::Ce,
                }
                let receipt = with_fast_paths(self.predict, || self.script.inject(fields, len));
                self.peer = self.script.conn.contiguous() as u32;
                (receipt, self.run(), Vec::new())
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn prop_a_predicted_segment_has_the_outcome_of_the_general_rules(
        steps in prop::collection::vec(step(), 1..80),
        stamps: bool,
        ecn: bool,
        segments in 0u64..40,
    ) {
        let mut twins = [true, false].map(|predict| Twin::new(predict, stamps, ecn, bulk(segments)));
        for step in &steps {
            let [ours, general] = twins.each_mut().map(|twin| twin.take(step));
            prop_assert_eq!(ours, general);
            let [ours, general] = twins.each_ref().map(|twin| format!("{:?}", twin.script.conn));
            prop_assert_eq!(ours, general);
        }
    }
}

#[test]
fn an_undisturbed_transfer_is_predicted_and_a_deviation_is_not() {
    let mut twin = Twin::new(true, true, false, silent());
    let now = twin.script.now;
    let expected = Segment {
        seq: irs(0),
        ack: iss(0),
        payload_len: 64,
        ..segment(Some(Timestamps { value: 200, echo: 100 }))
    };
    let predicts = |twin: &Twin, segment: &Segment| {
        segment.predictable().is_some_and(|plain| twin.script.conn.predicts(now, &plain))
    };
    assert!(predicts(&twin, &expected));
    let pushed = Segment { flags: Flags { psh: true, ..expected.flags }, ..expected };
    assert!(predicts(&twin, &pushed));
    let bare = Segment { payload_len: 0, ..expected };
    assert!(predicts(&twin, &bare));
    for deviation in [
        Segment { seq: irs(1), ..expected },
        Segment { ack: iss(1), ..expected },
        Segment { flags: Flags { fin: true, ..expected.flags }, ..expected },
        Segment { options: Options::default(), ..expected },
        Segment { payload_len: 1 << 20, ..expected },
        segment(Some(Timestamps { value: 1, echo: 1 })),
    ] {
        assert!(!predicts(&twin, &deviation), "{deviation:?}");
    }
    twin.script.stamp(200, 100);
    twin.script.data(100, 10);
    assert!(!predicts(&twin, &expected), "beyond a gap");
}

/// The peer's next segment, without payload.
fn segment(timestamps: Option<Timestamps>) -> Segment {
    Segment {
        source_mac: Mac::default(),
        destination_mac: Mac::default(),
        vlan: VlanTags::default(),
        queue: QueueId(0),
        flow: path(true).flow,
        seq: irs(0),
        ack: iss(0),
        flags: Flags { ack: true, ..Flags::default() },
        window: 65_535,
        options: Options { timestamps, ..Options::default() },
        ecn: Ecn::NotEct,
        payload_start: 66,
        payload_len: 0,
        partial_checksum: false,
    }
}
