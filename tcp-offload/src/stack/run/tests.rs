//! The fast path has the outcome of the general one: two ends get the same frames, one of them without header prediction.

use proptest::prelude::*;

use crate::stack::{
    Polling,
    twins::{Cabled, scene},
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn prop_the_fast_path_has_the_outcome_of_the_general_one(scene in scene()) {
        scene.play([true, false], |now, twins, step, frames| {
            let [ours, general] = twins.each_mut().map(|twin| {
                twin.end.stack.set_polling(if step.polled { Polling::Yes } else { Polling::No });
                twin.turn(now, frames)
            });
            prop_assert_eq!(&ours, &general);
            let [one, other] = twins.each_ref().map(Cabled::state);
            prop_assert_eq!(one, other);
            Ok(ours)
        })?;
    }
}
