//! The fabric of this user, which needs no privileges.

use xwarp_fabric::Place;
use xwarp_leg::fabric::Fabric;

use super::Finding;

/// The finding about the fabric.
pub(super) fn find() -> Finding {
    let advice = "programs of this machine reach each other without privileges: xwarp run --fabric PROGRAM";
    match Place::of(None) {
        Err(error) => Finding::warning("fabric", error.to_string()),
        Ok(place) => match Fabric::connect_once(&place) {
            Ok(_) => Finding::ok("fabric", format!("it serves at {}", place.socket().display())),
            Err(_) => {
                Finding::ok("fabric", format!("it starts at {} when it is used", place.socket().display()))
                    .advice(advice)
            }
        },
    }
}
