//! Sizes in the notation of command lines, and rates in perftest's units.

/// Parses `65536`, `64K`, `8M`, `1G` (powers of 1024).
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (digits, shift) = match text.as_bytes().last().map(u8::to_ascii_lowercase) {
        Some(b'k') => (&text[..text.len() - 1], 10),
        Some(b'm') => (&text[..text.len() - 1], 20),
        Some(b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 =
        digits.parse().map_err(|_| format!("'{text}' is not a number of bytes (like 65536 or 64K)"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is too large"))
}

/// Formats `65536` as `64K`; a suffix is used only for exact multiples.
pub fn short_bytes(bytes: u64) -> String {
    for (shift, suffix) in [(30, 'G'), (20, 'M'), (10, 'K')] {
        if bytes >= 1 << shift && bytes.trailing_zeros() >= shift {
            return format!("{}{suffix}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// The unit in which bandwidth is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RateUnit {
    /// 2^20 bytes a second, which perftest labels "MB/sec" up to version 4 and "MiB/sec" since.
    #[default]
    MebibytesPerSecond,
    /// 10^9 bits a second (`--report_gbits`).
    GigabitsPerSecond,
}

impl RateUnit {
    /// Converts `bytes_per_second` to this unit.
    pub fn convert(self, bytes_per_second: f64) -> f64 {
        match self {
            Self::MebibytesPerSecond => bytes_per_second / f64::from(1 << 20),
            Self::GigabitsPerSecond => bytes_per_second * 8.0 / 1e9,
        }
    }

    /// The unit's name in column heads.
    pub fn name(self) -> &'static str {
        match self {
            Self::MebibytesPerSecond => "MiB/sec",
            Self::GigabitsPerSecond => "Gb/sec",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_suffix() {
        assert_eq!(parse_bytes("65536"), Ok(65536));
        assert_eq!(parse_bytes("64K"), Ok(65536));
        assert_eq!(parse_bytes("8m"), Ok(8 << 20));
        assert_eq!(parse_bytes("1G"), Ok(1 << 30));
        for bad in ["", "K", "1.5K", "-1", "99999999999G"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn short_sizes_are_exact() {
        for bytes in [0, 1, 1000, 1024, 1536, 65536, 1 << 20, 3 << 20, 1 << 30] {
            assert_eq!(parse_bytes(&short_bytes(bytes)), Ok(bytes));
        }
        assert_eq!(short_bytes(65536), "64K");
    }

    #[test]
    fn rates_convert_as_perftest_does() {
        assert!((RateUnit::MebibytesPerSecond.convert(1_048_576.0) - 1.0).abs() < 1e-12);
        assert!((RateUnit::GigabitsPerSecond.convert(125e6) - 1.0).abs() < 1e-12);
    }
}
