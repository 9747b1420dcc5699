//! Tests of the card through its upper-layer interface.
