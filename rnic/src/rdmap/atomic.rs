//! Atomic Request and Response headers (RFC 7306 section 5.2), and the operations (section 5.1).
#![deny(clippy::indexing_slicing)]

use super::split;
use crate::ddp::{STag, TaggedOffset};

/// Bytes of a request's header.
///
/// RFC 7306 section 4 says 52, which is also the sum of figure 4's fields.
pub const ATOMIC_REQUEST_BYTES: usize = 52;
/// Bytes of a response's header: the sum of figure 6's fields. (Section 4 says 32, which agrees with no figure.)
pub const ATOMIC_RESPONSE_BYTES: usize = 12;

/// An atomic operation on a 64-bit word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOperation {
    /// Adds, field by field (section 5.1.1).
    FetchAdd {
        /// Add Data.
        add: u64,
        /// Add Mask: the most significant bit of each field; 0 is one field of 64 bits.
        mask: u64,
    },
    /// Replaces bits if the compared bits are as expected (section 5.1.2).
    CompareSwap {
        /// Swap Data.
        swap: u64,
        /// Swap Mask.
        swap_mask: u64,
        /// Compare Data.
        compare: u64,
        /// Compare Mask.
        compare_mask: u64,
    },
}

impl AtomicOperation {
    /// The new value of a word whose value is `original`.
    pub const fn apply(&self, original: u64) -> u64 {
        match *self {
            Self::FetchAdd { add, mask } => {
                // Adds all fields at once: sums without the fields' top bits cannot carry out of a field, and each
                // top bit is the exclusive or of both summands' top bits and the incoming carry.
                let top = mask | 1 << 63;
                let low = (original & !top).wrapping_add(add & !top);
                low ^ ((original ^ add) & top)
            }
            Self::CompareSwap { swap, swap_mask, compare, compare_mask } => {
                if (compare ^ original) & compare_mask == 0 {
                    (original & !swap_mask) | (swap & swap_mask)
                } else {
                    original
                }
            }
        }
    }
}

/// The Atomic Request header (figure 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicRequest {
    /// The operation.
    pub operation: AtomicOperation,
    /// Request identifier, returned in the response.
    pub id: u32,
    /// The responder's region.
    pub stag: STag,
    /// Tagged offset of the word.
    pub to: TaggedOffset,
}

const FETCH_ADD: u8 = 0;
const COMPARE_SWAP: u8 = 2;

impl AtomicRequest {
    /// Parses the header: `None` when `bytes` is too short, `Some(None)` when the operation is unknown.
    pub fn parse(bytes: &[u8]) -> Option<Option<Self>> {
        let ([_, _, _, code], rest) = split(bytes)?;
        let (id, rest) = split(rest)?;
        let (stag, rest) = split(rest)?;
        let (to, rest) = split(rest)?;
        let (data, rest) = split(rest)?;
        let (mask, rest) = split(rest)?;
        let (compare, rest) = split(rest)?;
        let (compare_mask, _) = split(rest)?;
        let (data, mask) = (u64::from_be_bytes(data), u64::from_be_bytes(mask));
        let operation = match code & 0x0f {
            FETCH_ADD => AtomicOperation::FetchAdd { add: data, mask },
            COMPARE_SWAP => AtomicOperation::CompareSwap {
                swap: data,
                swap_mask: mask,
                compare: u64::from_be_bytes(compare),
                compare_mask: u64::from_be_bytes(compare_mask),
            },
            _ => return Some(None),
        };
        let (id, stag) = (u32::from_be_bytes(id), STag::new(u32::from_be_bytes(stag)));
        Some(Some(Self { operation, id, stag, to: u64::from_be_bytes(to) }))
    }

    /// The header's bytes.
    pub fn to_bytes(self) -> [u8; ATOMIC_REQUEST_BYTES] {
        let (code, data, mask, compare, compare_mask) = match self.operation {
            AtomicOperation::FetchAdd { add, mask } => (FETCH_ADD, add, mask, 0, u64::MAX),
            AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask } => {
                (COMPARE_SWAP, swap, swap_mask, compare, compare_mask)
            }
        };
        let mut out = [0; ATOMIC_REQUEST_BYTES];
        let fields = [
            &u32::from(code).to_be_bytes()[..],
            &self.id.to_be_bytes(),
            &self.stag.value().to_be_bytes(),
            &self.to.to_be_bytes(),
            &data.to_be_bytes(),
            &mask.to_be_bytes(),
            &compare.to_be_bytes(),
            &compare_mask.to_be_bytes(),
        ];
        super::put_fields(&mut out, &fields);
        out
    }
}

/// The Atomic Response header (figure 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicResponse {
    /// Identifier of the request.
    pub id: u32,
    /// The word's value before the operation.
    pub original: u64,
}

impl AtomicResponse {
    /// Parses the header; `None` when `bytes` is too short.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (id, rest) = split(bytes)?;
        let (original, _) = split(rest)?;
        Some(Self { id: u32::from_be_bytes(id), original: u64::from_be_bytes(original) })
    }

    /// The header's bytes.
    pub fn to_bytes(self) -> [u8; ATOMIC_RESPONSE_BYTES] {
        let mut out = [0; ATOMIC_RESPONSE_BYTES];
        super::put_fields(&mut out, &[&self.id.to_be_bytes(), &self.original.to_be_bytes()]);
        out
    }
}

#[cfg(test)]
#[expect(clippy::indexing_slicing, reason = "a test that is wrong may panic")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The pseudocode of RFC 7306 section 5.1.1, bit by bit.
    fn add_by_the_book(original: u64, add: u64, mask: u64) -> u64 {
        let (mut carry, mut result) = (0, 0);
        for bit in 0..64 {
            let location = 1u64 << bit;
            let sum = carry + ((original & location) >> bit) + ((add & location) >> bit);
            carry = (sum & 2) >> 1;
            if sum & 1 != 0 {
                result |= location;
            }
            if mask & location != 0 {
                carry = 0;
            }
        }
        result
    }

    fn operation() -> impl Strategy<Value = AtomicOperation> {
        prop_oneof![
            any::<(u64, u64)>().prop_map(|(add, mask)| AtomicOperation::FetchAdd { add, mask }),
            any::<(u64, u64, u64, u64)>().prop_map(|(swap, swap_mask, compare, compare_mask)| {
                AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask }
            }),
        ]
    }

    proptest! {
        #[test]
        fn prop_masked_add_is_that_of_the_pseudocode(original: u64, add: u64, mask: u64) {
            let operation = AtomicOperation::FetchAdd { add, mask };
            prop_assert_eq!(operation.apply(original), add_by_the_book(original, add, mask));
        }

        #[test]
        fn prop_atomic_headers_survive_a_round_trip(operation in operation(), id: u32, stag: u32, to: u64) {
            let request = AtomicRequest { operation, id, stag: STag::new(stag), to };
            let bytes = request.to_bytes();
            prop_assert_eq!(AtomicRequest::parse(&bytes), Some(Some(request)));
            for short in 0..bytes.len() {
                prop_assert_eq!(AtomicRequest::parse(&bytes[..short]), None);
            }
            let response = AtomicResponse { id, original: to };
            let bytes = response.to_bytes();
            prop_assert_eq!(AtomicResponse::parse(&bytes), Some(response));
            for short in 0..bytes.len() {
                prop_assert_eq!(AtomicResponse::parse(&bytes[..short]), None);
            }
        }
    }

    #[test]
    fn rfc7306_s5_1_1_a_mask_of_zero_adds_64_bits() {
        let add = |original, add| AtomicOperation::FetchAdd { add, mask: 0 }.apply(original);
        assert_eq!(add(u64::MAX, 2), 1);
        assert_eq!(add(0xffff_ffff, 1), 0x1_0000_0000);
    }

    #[test]
    fn rfc7306_s5_1_2_only_masked_bits_are_compared_and_swapped() {
        let swap =
            AtomicOperation::CompareSwap { swap: 0xff, swap_mask: 0x0f, compare: 0x1234, compare_mask: 0xff };
        assert_eq!(swap.apply(0xab34), 0xab3f);
        assert_eq!(swap.apply(0xab35), 0xab35);
    }

    #[test]
    fn rfc7306_s5_2_1_unknown_codes_differ_from_short_headers() {
        let mut bytes = [0; ATOMIC_REQUEST_BYTES];
        bytes[3] = 1;
        assert_eq!(AtomicRequest::parse(&bytes), Some(None));
        bytes[3] = 0xf0;
        assert!(matches!(AtomicRequest::parse(&bytes), Some(Some(_))), "reserved bits are ignored");
    }
}
