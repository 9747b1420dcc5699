//! The order in which a device is searched: an explicit setting, the helper, the interface itself.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{path::PathBuf, time::Duration};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::SharedInterface,
};
use xwarp_driver::{DriverConfig, Interface, OpenError, Origin, OriginPreference};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const PERF: &str = env!("CARGO_BIN_EXE_xwarp-peer");
const LIMIT: Duration = Duration::from_secs(60);

/// Opens an interface, by name or address, as root in its namespace; returns its origin.
fn open(lab: &Lab, name: &str, origin: OriginPreference, helper: PathBuf) -> Result<Origin, OpenError> {
    let config = DriverConfig { origin, helper: Some(helper), ..DriverConfig::default() };
    lab.within(Side::A, || Ok(Interface::open(name, &config)?.attributes().origin)).unwrap()
}

#[test]
fn netns_shared_the_helper_is_asked_first_unless_the_owner_is_wanted() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let [v4, v6] = [Family::V4, Family::V6].map(|family| lab.address(Side::A, family).to_string());
    let nowhere = lab.file("nobody-listens.sock");
    let (granted, owned) = (OriginPreference::Force(Origin::Granted), OriginPreference::Force(Origin::Owned));
    for name in [INTERFACE, &v4, &v6] {
        let own = open(&lab, name, OriginPreference::Probe, nowhere.clone()).unwrap();
        assert_eq!(own, Origin::Owned, "{name}: no helper");
        let error = open(&lab, name, granted, nowhere.clone()).unwrap_err();
        assert!(matches!(error, OpenError::NoHelper { .. }), "{name}: {error:?}");
    }

    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let socket = || shared.socket().to_owned();
    for name in [INTERFACE, &v4, &v6] {
        for origin in [OriginPreference::Probe, granted] {
            assert_eq!(open(&lab, name, origin, socket()).unwrap(), Origin::Granted, "{name}");
        }
        let error = open(&lab, name, owned, socket()).unwrap_err();
        let OpenError::Shared { holder: Some(holder), .. } = &error else { panic!("{name}: {error:?}") };
        assert_eq!(holder.pid, shared.helper.id());
    }
    // This process opens an interface itself if the helper does not share it.
    lab.run(Side::A, "ip", &["link", "add", "xw1", "type", "veth", "peer", "name", "xw2"]).unwrap();
    for name in ["xw1", "xw2"] {
        lab.run(Side::A, "ip", &["link", "set", "dev", name, "up"]).unwrap();
    }
    assert_eq!(open(&lab, "xw1", OriginPreference::Probe, socket()).unwrap(), Origin::Owned);
    let error = open(&lab, "xw1", granted, socket()).unwrap_err();
    assert!(matches!(&error, OpenError::Refused(text) if text.contains(INTERFACE)), "{error:?}");

    // The log shows which it is.
    let mut command = shared.unprivileged(PERF);
    command.args(["send_bw", "-d", INTERFACE]).env("RUST_LOG", "info");
    Running::start(command).unwrap().wait_for("opened through xwarpd", LIMIT).unwrap();
}
