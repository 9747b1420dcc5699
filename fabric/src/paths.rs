//! [`Paths`]: faults between hosts, by the model of the simulator's wire and of the hop of `ci/lab`.

use std::collections::HashMap;
use std::time::{Duration, Instant as Clock};

use xwarp_tcp::sim::{Direction, Faults, complete_checksums, words::time};
use xwarp_tcp::time::Instant;

/// Frames that may be on their way on one path; more are lost. A path with a long delay would otherwise hold what a sender likes.
const MAX_FRAMES: usize = 4096;
/// Directions that have faults, or had some.
const MAX_PATHS: usize = 4096;

/// The direction from one host to another.
#[derive(Debug)]
struct Path {
    direction: Direction,
    faults: Faults,
    seed: u64,
    cut: Option<Cut>,
}

/// A time in which nothing passes.
#[derive(Debug, Clone, Copy)]
struct Cut {
    begins: Begin,
    /// `None`: it lasts until it is healed.
    lasts: Option<Duration>,
}

/// When a cut begins.
#[derive(Debug, Clone, Copy)]
enum Begin {
    At(Instant),
    /// With the frame that follows so many others.
    AfterFrames(u64),
}

impl Begin {
    /// The words after `after`: a time from now, or a number of frames.
    fn parse(text: &str, now: Instant) -> Result<Self, String> {
        match text.parse() {
            Ok(frames) => Ok(Self::AfterFrames(frames)),
            Err(_) => time(text).map(|wait| Self::At(now + wait)),
        }
    }
}

impl Cut {
    /// Whether a frame that is sent now is lost.
    fn loses(&mut self, now: Instant) -> bool {
        if let Begin::AfterFrames(left) = &mut self.begins {
            if *left > 0 {
                *left -= 1;
                return false;
            }
            self.begins = Begin::At(now);
        }
        matches!(self.begins, Begin::At(begin) if now >= begin && self.lasts.is_none_or(|lasts| now < begin + lasts))
    }
}

/// The directions with faults, by the numbers of the hosts at their ends.
#[derive(Debug)]
pub(crate) struct Paths {
    paths: HashMap<(u16, u16), Path>,
    began: Clock,
}

impl Default for Paths {
    fn default() -> Self {
        Self { paths: HashMap::new(), began: Clock::now() }
    }
}

/// What becomes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// It is delivered at once.
    Faultless,
    /// It is on its way, or lost: it was copied.
    Faulty,
    /// It is lost.
    Cut,
}

impl Paths {
    /// Whether no direction has faults, so that no frame need be looked up.
    pub(crate) fn have_no_faults(&self) -> bool {
        self.paths.is_empty()
    }

    /// Changes the faults from one host to another by words: `NAME VALUE ...` as of [`Faults::set`], `seed N`, `cut`, `heal`,
    /// `clear`. After `cut`, `after TIME` or `after FRAMES` says when it begins, and `for TIME` how long it lasts.
    ///
    /// # Errors
    /// The text says which word is wrong; nothing has changed then.
    pub(crate) fn change(&mut self, from: u16, to: u16, words: &str) -> Result<(), String> {
        let known = self.paths.get(&(from, to));
        if known.is_none() && self.paths.len() >= MAX_PATHS {
            return Err(format!("faults of {MAX_PATHS} directions are set already"));
        }
        let (mut faults, mut seed, mut cut) =
            known.map_or((Faults::default(), 1, None), |path| (path.faults, path.seed, path.cut));
        let now = self.now();
        let mut again = known.is_none();
        let mut words = words.split_whitespace();
        while let Some(word) = words.next() {
            match word {
                "cut" => cut = Some(Cut { begins: Begin::At(now), lasts: None }),
                "heal" => cut = None,
                "clear" => (faults, cut) = (Faults::default(), None),
                name => {
                    let value = words.next().ok_or_else(|| format!("'{name}' has no value"))?;
                    match (name, &mut cut) {
                        ("seed", _) => {
                            seed = value.parse().map_err(|_| format!("'{value}' is not a seed, a number"))?;
                            again = true;
                        }
                        ("after", Some(cut)) => cut.begins = Begin::parse(value, now)?,
                        ("for", Some(cut)) => cut.lasts = Some(time(value)?),
                        _ => faults.set(name, value)?,
                    }
                }
            }
        }
        if again {
            // Both directions of a pair differ.
            let direction = Direction::new(faults, seed ^ u64::from(from) << 32 ^ u64::from(to) << 48);
            self.paths.insert((from, to), Path { direction, faults, seed, cut });
        } else if let Some(path) = self.paths.get_mut(&(from, to)) {
            path.direction.set_faults(faults);
            (path.faults, path.cut) = (faults, cut);
        }
        Ok(())
    }

    /// What becomes of a frame from one host to another, of which `copy` makes a copy where one is needed.
    pub(crate) fn send(&mut self, from: u16, to: u16, copy: impl FnOnce() -> Vec<u8>) -> Way {
        let now = self.now();
        let Some(path) = self.paths.get_mut(&(from, to)) else { return Way::Faultless };
        if path.cut.as_mut().is_some_and(|cut| cut.loses(now)) {
            return Way::Cut;
        }
        // Frames that are still on their way are not overtaken.
        if path.faults == Faults::default() && path.direction.next_due().is_none() {
            return Way::Faultless;
        }
        if path.direction.in_flight() >= MAX_FRAMES {
            return Way::Cut;
        }
        let mut bytes = copy();
        // What follows may change bytes, and the receiver is to notice.
        complete_checksums(&mut bytes);
        path.direction.send(now, &bytes);
        Way::Faulty
    }

    /// Takes a frame that has arrived, with the hosts at the ends of its way.
    pub(crate) fn next(&mut self) -> Option<(u16, u16, Vec<u8>)> {
        let now = self.now();
        for ((from, to), path) in &mut self.paths {
            if let Some(frame) = path.direction.deliver(now) {
                return Some((*from, *to, frame));
            }
        }
        None
    }

    /// Time until a frame arrives; `None` while none is on its way.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        let due = self.paths.values().filter_map(|path| path.direction.next_due()).min()?;
        Some(due.since(self.now()))
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame() -> Vec<u8> {
        vec![0; 100]
    }

    #[test]
    fn ways_are_faultless_cut_healed_and_slow() {
        let mut paths = Paths::default();
        assert!(paths.have_no_faults());
        assert_eq!(paths.send(1, 2, || panic!("a copy")), Way::Faultless);
        paths.change(1, 2, "cut").unwrap();
        assert_eq!(paths.send(1, 2, || panic!("a copy")), Way::Cut);
        assert_eq!(paths.send(2, 1, || panic!("a copy")), Way::Faultless, "one direction");
        paths.change(1, 2, "heal").unwrap();
        assert_eq!(paths.send(1, 2, || panic!("a copy")), Way::Faultless);
        paths.change(1, 2, "delay 20ms").unwrap();
        assert_eq!(paths.send(1, 2, frame), Way::Faulty);
        assert_eq!(paths.next(), None, "it takes 20 ms");
        let due = paths.next_due().unwrap();
        assert!(due <= Duration::from_millis(20), "{due:?}");
        // Frames on their way are not overtaken by those after the end of the faults.
        paths.change(1, 2, "clear").unwrap();
        assert_eq!(paths.send(1, 2, frame), Way::Faulty);
        std::thread::sleep(due);
        while paths.next_due().is_some() {
            let Some((from, to, bytes)) = paths.next() else { continue };
            assert_eq!((from, to, bytes), (1, 2, frame()));
        }
        assert_eq!(paths.send(1, 2, || panic!("a copy")), Way::Faultless);
    }

    #[test]
    fn cuts_begin_after_frames_or_a_time_and_end() {
        let mut paths = Paths::default();
        let passes = |paths: &mut Paths| paths.send(1, 2, || panic!("a copy")) == Way::Faultless;
        paths.change(1, 2, "cut after 2 for 50ms").unwrap();
        let begin = Clock::now();
        assert!(passes(&mut paths) && passes(&mut paths) && !passes(&mut paths));
        while !passes(&mut paths) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(begin.elapsed() >= Duration::from_millis(50));
        paths.change(1, 2, "cut after 1000s").unwrap();
        assert!(passes(&mut paths), "it begins later");
        let begin = Clock::now();
        paths.change(1, 2, "cut after 50ms").unwrap();
        while passes(&mut paths) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(begin.elapsed() >= Duration::from_millis(50));
        // Another change of the direction leaves the cut as it is.
        paths.change(1, 2, "seed 7 delay 0ms").unwrap();
        assert!(!passes(&mut paths));
        paths.change(1, 2, "cut for 0s").unwrap();
        assert!(passes(&mut paths));
    }

    #[test]
    fn wrong_words_change_nothing() {
        let mut paths = Paths::default();
        for words in [
            "loss",
            "loss 200%",
            "los 1%",
            "seed x",
            "cut loss 7",
            "cut after x",
            "cut for 1",
            "for 1s",
            "after 3",
        ] {
            assert!(paths.change(1, 2, words).is_err(), "{words}");
            assert!(paths.have_no_faults(), "{words}");
        }
    }

    #[test]
    fn what_is_on_its_way_is_bounded() {
        let mut paths = Paths::default();
        for to in 0..MAX_PATHS as u16 {
            paths.change(0, to, "cut").unwrap();
        }
        assert!(paths.change(1, 2, "cut").is_err());
        let mut paths = Paths::default();
        paths.change(1, 2, "delay 1000s").unwrap();
        let sent = (0..2 * MAX_FRAMES).take_while(|_| paths.send(1, 2, frame) == Way::Faulty).count();
        assert_eq!(sent, MAX_FRAMES);
    }
}
