//! Errors with their own exit status, and the one-line form of an error.

use std::process::ExitCode;

/// The other end is gone: its program died, or the network between the two ends failed.
#[derive(Debug, thiserror::Error)]
#[error("the other end is gone: {0}")]
pub struct PeerGone(pub String);

/// A result is below a limit given on the command line.
#[derive(Debug, thiserror::Error)]
#[error("{quantity} of {found} is below the limit of {limit}")]
pub struct BelowLimit {
    /// The limited quantity.
    pub quantity: &'static str,
    /// Its value.
    pub found: f64,
    /// The minimum accepted value.
    pub limit: f64,
}

/// The exit status of the program for an error; the help text lists them.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(status(error))
}

fn status(error: &anyhow::Error) -> u8 {
    if error.downcast_ref::<PeerGone>().is_some() {
        3
    } else if error.downcast_ref::<BelowLimit>().is_some() {
        4
    } else {
        1
    }
}

/// Formats an error and its causes in one line. Omits a cause whose text the preceding error already
/// contains, because some libraries give a cause both in the text and as the source.
pub fn one_line(error: &anyhow::Error) -> String {
    xwarp_driver::one_line(error.as_ref())
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::Context as _;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("capture file /x: {source}")]
    struct Capture {
        source: io::Error,
    }

    #[test]
    fn a_cause_is_printed_once() {
        let error = Capture { source: io::Error::other("disk full") };
        let error = Err::<(), _>(error).context("cannot open xw0").unwrap_err();
        assert_eq!(one_line(&error), "cannot open xw0: capture file /x: disk full");
        let error = Err::<(), _>(io::Error::other("disk full")).context("writing").unwrap_err();
        assert_eq!(one_line(&error), "writing: disk full");
    }

    #[test]
    fn the_exit_status_is_that_of_the_cause() {
        let gone = Err::<(), _>(PeerGone("timed out".into())).context("bandwidth test").unwrap_err();
        assert_eq!(
            (status(&gone), one_line(&gone).as_str()),
            (3, "bandwidth test: the other end is gone: timed out")
        );
        let below = BelowLimit { quantity: "the bandwidth", found: 1.0, limit: 2.0 };
        assert_eq!(status(&anyhow::Error::from(below)), 4);
        assert_eq!(status(&anyhow::anyhow!("else")), 1);
    }
}
