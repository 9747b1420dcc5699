//! Runs the programs of the guide's two tutorials, over a network in memory with and without faults.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../examples/kv/client.rs"]
mod client;
#[path = "../examples/kv/server.rs"]
mod server;
#[path = "../examples/kv/slot.rs"]
mod slot;
#[path = "../examples/verified_write.rs"]
#[allow(dead_code, reason = "a program of its own")]
mod verified_write;

use std::{net::SocketAddr, thread};

use xwarp_verbs::{
    Device, DeviceOptions,
    cm::ListenOptions,
    sim::{self, Faults, WireConfig},
};

#[test]
fn tutorial_the_first_write_is_verified() {
    verified_write::run().unwrap();
}

/// A server and `clients` of it, on a wire with `config`.
fn with_store(config: &WireConfig, clients: usize, talk: impl Fn(usize, &client::Store) + Sync) {
    let (a, b) = sim::pair(*config, 1500).unwrap();
    let open = |end| Device::over(Box::new(end), DeviceOptions::default()).unwrap();
    let (device, peer) = (open(a), open(b));
    let address = SocketAddr::from((sim::ipv4(1), 6380));
    let listener = device.listen(address, ListenOptions::default()).unwrap();
    thread::scope(|scope| {
        let serving =
            scope.spawn(|| server::serve(&device, &listener, clients).map_err(|error| error.to_string()));
        for number in 0..clients {
            let store = client::Store::connect(&peer, address).unwrap();
            let talk = &talk;
            scope.spawn(move || {
                talk(number, &store);
                store.close().unwrap();
            });
        }
        serving.join().unwrap().unwrap();
    });
}

#[test]
fn tutorial_the_store_keeps_what_clients_put() {
    with_store(&WireConfig::default(), 1, |_, store| {
        assert_eq!(store.get(b"absent").unwrap(), None);
        assert!(store.put(b"key", b"first").unwrap());
        assert!(store.put(b"key", b"second").unwrap());
        assert_eq!(store.get(b"key").unwrap().unwrap(), b"second");
        assert!(store.put(&[7; slot::MAX_KEY], &[8; slot::MAX_VALUE]).unwrap());
        assert_eq!(store.get(&[7; slot::MAX_KEY]).unwrap().unwrap(), [8; slot::MAX_VALUE]);
        assert!(store.put(b"empty", b"").unwrap());
        assert_eq!(store.get(b"empty").unwrap().unwrap(), b"");
        assert!(!store.put(&[7; slot::MAX_KEY + 1], b"the key is too long").unwrap());
        assert!(!store.put(b"", b"no key").unwrap());
        assert!(!store.put(b"key", &[8; slot::MAX_VALUE + 1]).unwrap());
        assert_eq!(store.get(b"key").unwrap().unwrap(), b"second");
    });
}

/// Readers of one slot see one of the values that were put there, whole, also on a wire that loses and reorders frames.
#[test]
fn tutorial_readers_never_see_a_mixture() {
    let faults = Faults { loss: 0.01, reorder: 0.02, ..Faults::default() };
    let config = WireConfig { seed: 54, faults: [faults, faults], ..WireConfig::default() };
    with_store(&config, 3, |number, store| {
        for round in 0..50 {
            if number == 0 {
                assert!(store.put(b"contended", &[round; slot::MAX_VALUE]).unwrap());
            } else if let Some(value) = store.get(b"contended").unwrap() {
                assert!(value.len() == slot::MAX_VALUE && value.iter().all(|byte| *byte == value[0]));
            }
        }
    });
}

#[test]
fn tutorial_a_slot_that_is_being_written_is_noticed() {
    let mut bytes = slot::encode(b"key", b"value").unwrap();
    assert_eq!(slot::decode(&bytes, b"key"), slot::Found::Value(b"value".to_vec()));
    assert_eq!(slot::decode(&bytes, b"other"), slot::Found::Nothing);
    for at in 0..slot::SLOT_BYTES {
        bytes[at] ^= 1;
        assert_eq!(slot::decode(&bytes, b"key"), slot::Found::Torn, "byte {at}");
        bytes[at] ^= 1;
    }
}
