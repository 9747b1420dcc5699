//! Scenario tests of whole connections, by RFC.

mod transfer;
