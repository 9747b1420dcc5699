use super::*;

fn at(minutes: u64) -> Instant {
    Instant::ZERO + Duration::from_mins(minutes)
}

fn plain() -> PathMtu {
    PathMtu::new(9000, false, &PathMtuConfig::default())
}

/// Probes until the search has converged, over a path that carries `mtu` bytes. Returns the sizes tried.
fn search(path: &mut PathMtu, mtu: u16, now: Instant) -> Vec<u16> {
    let mut tried = Vec::new();
    while let Some(size) = path.probe_size(now, u16::MAX) {
        tried.push(size);
        assert!(size > path.bytes() && size <= 9000, "{tried:?}");
        if size <= mtu {
            path.probe_succeeded(size);
        } else {
            path.probe_failed(now, size, &PathMtuConfig::default());
        }
        assert!(tried.len() < 20, "{tried:?}");
    }
    tried
}

#[test]
fn rfc4821_s7_2_a_path_as_wide_as_its_first_hop_is_not_probed() {
    let mut path = plain();
    assert_eq!((path.bytes(), path.probe_size(at(1000), u16::MAX)), (9000, None));
    assert!(path.is_plain() && !path.is_searching(at(1000)));
}

#[test]
fn rfc4821_s7_3_the_search_converges_on_every_path() {
    let config = PathMtuConfig { initial: Some(1280), ..PathMtuConfig::default() };
    for mtu in (1280..=9000).step_by(52).chain(COMMON) {
        let mut path = PathMtu::new(9000, false, &config);
        let tried = search(&mut path, mtu, at(0));
        assert!(tried.len() <= 10, "{mtu}: {tried:?}");
        assert!(path.bytes() <= mtu, "{mtu}: {tried:?}");
        assert!(mtu - path.bytes() <= path.bytes() / CONVERGED, "{mtu}: {} by {tried:?}", path.bytes());
    }
    let mut path = PathMtu::new(9000, false, &config);
    assert_eq!(search(&mut path, 1500, at(0))[..3], [9000, 1500, 4352], "the bound, then common sizes");
    assert_eq!(path.bytes(), 1500);
}

#[test]
fn rfc8201_s5_3_an_estimate_expires() {
    let config = PathMtuConfig::default();
    let mut path = plain();
    assert!(path.too_big(at(0), 1400, &config));
    assert_eq!((path.bytes(), path.probe_size(at(9), u16::MAX)), (1400, None));
    assert_eq!(path.probe_size(at(10), u16::MAX), Some(9000));
    path.probe_failed(at(10), 9000, &config);
    assert_eq!(search(&mut path, 1400, at(11)).last(), Some(&1480));
    assert_eq!((path.bytes(), path.probe_size(at(20), u16::MAX)), (1400, None));
    assert!(path.is_searching(at(21)));

    let never = PathMtuConfig { retry_after: Duration::MAX, ..config };
    let mut path = plain();
    path.too_big(at(0), 1400, &never);
    assert!(!path.is_searching(at(1_000_000)), "RFC 8201 section 5.3: an estimate may be kept for ever");
    let hasty = PathMtuConfig { retry_after: Duration::ZERO, ..config };
    path.too_big(at(0), 1300, &hasty);
    assert!(
        !path.is_searching(at(4)) && path.is_searching(at(5)),
        "RFC 4821 section 7.3: 5 minutes at least"
    );
}

#[test]
fn rfc4821_s7_7_a_black_hole_lowers_the_size_in_steps() {
    let config = PathMtuConfig::default();
    let mut path = plain();
    path.delivered(1400);
    let mut sizes = Vec::new();
    for step in [0, 0, 0, 1, 2, 3, 4, 5, 0] {
        path.black_hole(step, &config);
        sizes.push(path.bytes());
    }
    assert_eq!(sizes, [1400, 1024, 1024, 512, 256, 128, 68, 68, 68]);
    let mut v6 = PathMtu::new(9000, true, &config);
    v6.black_hole(0, &config);
    v6.black_hole(1, &config);
    assert_eq!(v6.bytes(), 1280);
    assert_eq!(path.probe_size(at(0), u16::MAX), Some(9000), "and then up again");
}

#[test]
fn rfc4821_s7_6_1_a_probe_that_the_source_did_not_fill_proves_its_actual_size() {
    let mut path = PathMtu::new(1500, false, &PathMtuConfig { initial: Some(1280), ..Default::default() });
    assert_eq!(path.probe_size(at(0), u16::MAX), Some(1500));
    path.probe_succeeded(1340);
    assert_eq!((path.bytes(), path.probe_size(at(0), u16::MAX)), (1340, Some(1500)));
    path.probe_succeeded(1497);
    assert_eq!((path.bytes(), path.probe_size(at(0), u16::MAX)), (1497, None));
}

#[test]
fn rfc1191_s3_a_message_never_raises_the_estimate_or_lowers_it_below_the_floor() {
    let config = PathMtuConfig::default();
    let mut path = PathMtu::new(1500, true, &config);
    assert!(!path.too_big(at(0), 1279, &config) && !path.too_big(at(0), 1500, &config));
    assert!(path.too_big(at(0), 1400, &config));
    assert!(!path.too_big(at(0), 9000, &config));
    assert_eq!(path.bytes(), 1400);
}

#[test]
fn a_change_of_the_first_hop_is_followed() {
    let config = PathMtuConfig::default();
    let mut path = PathMtu::new(1500, false, &config);
    path.link_changed(9000);
    assert_eq!(path.bytes(), 9000, "no narrower hop was ever seen");
    path.too_big(at(0), 1400, &config);
    path.link_changed(1500);
    assert_eq!((path.bytes(), path.probe_size(at(0), u16::MAX)), (1400, None));
    path.link_changed(1300);
    assert_eq!(path.bytes(), 1300);
}

#[test]
fn rfc4821_s7_8_a_size_that_is_lost_too_often_is_given_up() {
    let mut prober = Prober::default();
    prober.watch(1024, 1000);
    for n in 0..WATCH_LEAST {
        prober.delivered(0, 900);
        if n % 5 == 0 { prober.lost(1400) } else { prober.delivered(0, 1400) }
    }
    assert_eq!(prober.take_verdict(), Some(Verdict::Unreliable { above: 1024 }));
    prober.watch(1024, 1000);
    for _ in 0..WATCH_MOST {
        prober.delivered(0, 1400);
    }
    for _ in 0..WATCH_MOST {
        prober.lost(1400);
    }
    assert_eq!(prober.take_verdict(), None, "later losses have other reasons");
}
