//! Tests of MPA as a whole: a test link, a test upper layer, and oracles.
