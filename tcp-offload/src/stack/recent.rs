//! [`Recent`]: the connection of the last segment, which most often receives the next one too.

use crate::{
    link::{Link, RxFrame},
    wire::{Segment, Template},
};

/// The connection of the last segment, and the headers by which its next predictable segment is recognised without a flow
/// look-up.
#[derive(Debug, Default)]
pub(super) struct Recent {
    index: Option<u32>,
    /// Created with the second segment in a row, so that connections whose segments alternate do not pay for it.
    template: Option<Template>,
}

impl Recent {
    /// Records that connection `index` got `segment`, which was parsed from `frame`.
    #[inline]
    pub(super) fn note(&mut self, link: &dyn Link, frame: &RxFrame, index: u32, segment: &Segment) {
        let again = self.index == Some(index);
        *self = Self {
            index: Some(index),
            template: if again { Template::new(link, frame, segment) } else { None },
        };
    }

    /// The connection, and the template of its predictable segments, if there is one.
    #[inline]
    pub(super) fn template(&self) -> Option<(u32, &Template)> {
        Some((self.index?, self.template.as_ref()?))
    }

    /// Drops the connection: it has been removed, and its flow may belong to another one.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}
