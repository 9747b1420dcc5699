//! Faults in words, as people write them on command lines: the hop of `ci/lab` and the fabric read them here.

use std::time::Duration;

use super::{Blackout, Faults, Gilbert};
use crate::time::Instant;

/// The names that [`Faults::set`] takes.
pub const FAULT_NAMES: [&str; 12] = [
    "loss",
    "bursts",
    "blackout",
    "delay",
    "jitter",
    "rate",
    "queue",
    "reorder",
    "reorder-by",
    "duplicate",
    "corrupt",
    "repair",
];

impl Faults {
    /// Sets the fault `name`, one of [`FAULT_NAMES`], to `value`: a chance (`1%`, `0.01`), a time (`50ms`), a rate in bits per second
    /// (`100M`), a number of frames, or several joined by commas.
    ///
    /// # Errors
    /// The text says which word is wrong, for people.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "loss" => self.loss = chance(value)?,
            "bursts" => self.bursts = Some(bursts(value)?),
            "blackout" => self.blackout = Some(blackout(value)?),
            "delay" => self.delay = time(value)?,
            "jitter" => self.jitter = time(value)?,
            "rate" => self.rate_bytes = Some(rate(value)? / 8),
            "queue" => {
                self.queue_frames =
                    value.parse().map_err(|_| format!("'{value}' is not a number of frames"))?;
            }
            "reorder" => self.reorder = chance(value)?,
            "reorder-by" => self.reorder_by = time(value)?,
            "duplicate" => self.duplicate = chance(value)?,
            "corrupt" => self.corrupt = chance(value)?,
            "repair" => self.repair_checksum = chance(value)?,
            _ => return Err(format!("'{name}' is no fault: {}", FAULT_NAMES.join(", "))),
        }
        Ok(())
    }
}

/// Splits a number from its suffix.
fn number(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    Some((digits.parse().ok()?, unit))
}

/// Parses bits per second; K, M, G are powers of 1000.
///
/// # Errors
/// For people, as those below.
pub fn rate(text: &str) -> Result<u64, String> {
    let factor = |unit| match unit {
        "" => Some(1.0),
        "K" | "k" => Some(1e3),
        "M" | "m" => Some(1e6),
        "G" | "g" => Some(1e9),
        _ => None,
    };
    number(text)
        .and_then(|(value, unit)| Some(value * factor(unit)?))
        .filter(|bits| *bits >= 8.0)
        .map(|bits| bits as u64)
        .ok_or_else(|| format!("'{text}' is not a rate like 100M"))
}

/// Parses a time with its unit.
pub fn time(text: &str) -> Result<Duration, String> {
    let seconds = |unit| match unit {
        "ns" => Some(1e-9),
        "us" => Some(1e-6),
        "ms" => Some(1e-3),
        "s" => Some(1.0),
        _ => None,
    };
    number(text)
        .and_then(|(value, unit)| Duration::try_from_secs_f64(value * seconds(unit)?).ok())
        .ok_or_else(|| format!("'{text}' is not a time like 50ms"))
}

/// Parses a probability from 0 to 1, or in percent.
pub fn chance(text: &str) -> Result<f64, String> {
    let chance = match number(text) {
        Some((value, "%")) => value / 100.0,
        Some((value, "")) => value,
        _ => f64::NAN,
    };
    if (0.0..=1.0).contains(&chance) {
        Ok(chance)
    } else {
        Err(format!("'{text}' is not a probability like 1%"))
    }
}

/// Parses the probabilities to enter and to leave the bad state per frame, and of loss in it.
pub fn bursts(text: &str) -> Result<Gilbert, String> {
    let parts: Vec<f64> = text.split(',').map(chance).collect::<Result<_, _>>()?;
    match parts.as_slice() {
        [enter, leave, loss] => Ok(Gilbert { enter: *enter, leave: *leave, loss: *loss }),
        _ => Err(format!("'{text}' is not three probabilities")),
    }
}

/// Parses the start of the first blackout, its length, and the period.
pub fn blackout(text: &str) -> Result<Blackout, String> {
    let parts: Vec<Duration> = text.split(',').map(time).collect::<Result<_, _>>()?;
    match parts.as_slice() {
        [from, length, every] => {
            Ok(Blackout { from: Instant::ZERO + *from, length: *length, every: Some(*every) })
        }
        _ => Err(format!("'{text}' is not three times")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_has_a_word() {
        let values =
            ["1%", "1%,0.5,1", "1s,20ms,300ms", "5ms", "1ms", "100M", "9", "5%", "2ms", "0.5", "1", "25%"];
        let mut faults = Faults::default();
        for (name, value) in FAULT_NAMES.into_iter().zip(values) {
            let before = faults;
            faults.set(name, value).unwrap();
            assert_ne!(faults, before, "{name}");
            assert!(faults.set(name, "x").is_err(), "{name}");
        }
        assert_eq!((faults.rate_bytes, faults.delay), (Some(12_500_000), Duration::from_millis(5)));
        assert!(faults.set("los", "1%").unwrap_err().contains("reorder-by"));
    }

    #[test]
    fn wrong_words_are_refused() {
        assert!(chance("101%").is_err() && chance("-1").is_err() && chance("").is_err());
        assert!(time("5").is_err() && time("5m").is_err() && time("1e99s").is_err());
        assert!(rate("5T").is_err() && rate("0").is_err());
        assert!(bursts("1,1").is_err() && blackout("1s,1s").is_err());
    }
}
