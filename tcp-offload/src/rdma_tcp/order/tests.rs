//! The order field, compared with the definition in the proposal, for any arrival order and numbers that wrap.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[test]
fn rdma_tcp_s3_4_the_example_of_the_order_field() {
    let mut window = OrderWindow::new(MessageNumber(88));
    for number in 88..91 {
        window.process(MessageNumber(number));
        assert!(!window.may_process(MessageNumber(97), Order(5)), "91 is missing");
    }
    window.process(MessageNumber(91));
    assert!(window.may_process(MessageNumber(97), Order(5)));
    assert!(!window.may_process(MessageNumber(97), Order(4)));
    assert!(window.may_process(MessageNumber(97), Order::AT_ONCE));
    assert!(window.may_process(MessageNumber(92), Order::STRICT));
}

#[test]
fn a_number_beyond_the_window_waits_and_is_not_noted() {
    let mut window = OrderWindow::new(MessageNumber(u32::MAX));
    assert!(window.may_process(MessageNumber(WINDOW - 2), Order::AT_ONCE));
    assert!(!window.may_process(MessageNumber(WINDOW - 1), Order::AT_ONCE));
    window.process(MessageNumber(WINDOW - 1));
    assert!(!window.is_processed(MessageNumber(WINDOW - 1)));
    window.process(MessageNumber(WINDOW - 2));
    assert!(window.words.len() <= 1025, "8 KiB");
}

#[test]
fn a_number_before_the_window_is_never_processed_again() {
    let mut window = OrderWindow::new(MessageNumber(5));
    assert!(!window.may_process(MessageNumber(4), Order::AT_ONCE));
    window.process(MessageNumber(4));
    assert_eq!(window.oldest(), MessageNumber(5));
}

/// A message of the model: its order field, and how many of its segments have arrived.
#[derive(Debug, Clone, Copy)]
struct Message {
    order: u16,
    segments: u8,
    arrived: u8,
}

proptest! {
    /// Segments of two senders' groups arrive in any order: group 1 with order fields, and responses, which have none
    /// and must not influence group 1. Each message is processed as soon as the window allows it. The rule is the
    /// text's, evaluated over the set of all processed messages.
    #[test]
    fn prop_no_message_is_touched_before_its_order_allows_and_each_is_processed_once(
        start in prop_oneof![Just(u32::MAX - 7), Just(u32::MAX), any::<u32>()],
        orders in prop::collection::vec((prop_oneof![Just(0u16), Just(1), Just(2), Just(u16::MAX)], 1u8..4), 1..60),
        responses in 0usize..20,
        shuffle in prop::collection::vec(any::<u32>(), 300),
    ) {
        let mut messages: Vec<Message> =
            orders.iter().map(|&(order, segments)| Message { order, segments, arrived: 0 }).collect();
        // An arrival is a segment of a message, or `None`: a segment of a response.
        let mut arrivals: Vec<Option<usize>> = messages
            .iter()
            .enumerate()
            .flat_map(|(at, m)| std::iter::repeat_n(Some(at), usize::from(m.segments)))
            .chain(std::iter::repeat_n(None, responses))
            .collect();
        for at in (1..arrivals.len()).rev() {
            arrivals.swap(at, shuffle[at] as usize % (at + 1));
        }
        let number = |at: usize| MessageNumber(start.wrapping_add(at as u32));
        let mut window = OrderWindow::new(number(0));
        let mut processed = BTreeSet::new();
        for arrival in arrivals {
            let Some(at) = arrival else { continue };
            messages[at].arrived += 1;
            loop {
                let ready = (0..messages.len()).find(|at| {
                    messages[*at].arrived == messages[*at].segments
                        && window.may_process(number(*at), Order(messages[*at].order))
                });
                // The text's condition: all messages up to number - N - 1 are processed.
                for (at, message) in messages.iter().enumerate() {
                    let allowed = message.order == u16::MAX
                        || (0..at.saturating_sub(usize::from(message.order))).all(|before| processed.contains(&before));
                    prop_assert_eq!(
                        window.may_process(number(at), Order(message.order)),
                        allowed && !processed.contains(&at)
                    );
                }
                let Some(at) = ready else { break };
                prop_assert!(processed.insert(at), "processed twice");
                window.process(number(at));
                let oldest = (0..=messages.len()).find(|at| !processed.contains(at)).unwrap();
                prop_assert_eq!(window.oldest(), number(oldest));
            }
        }
        prop_assert_eq!(processed.len(), messages.len(), "every message is processed in the end");
        prop_assert!(window.words.len() <= 1);
    }
}
