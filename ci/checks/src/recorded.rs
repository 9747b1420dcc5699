//! [`Recorded`]: a lab in which the frames of SDP are recorded at both sides. When it ends, the dissector of SDP, which was written
//! from the draft, has read all captures.

use std::{
    collections::BTreeMap,
    fs,
    ops::Deref,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use anyhow::{Context as _, Result, anyhow};

use crate::{
    lab::{Lab, LabOptions},
    tshark,
};

/// Captures that are read at a time: more than one core is rarely free.
const READERS: usize = 2;

/// See the [module](self).
#[derive(Debug)]
pub struct Recorded {
    lab: Lab,
    captures: PathBuf,
}

impl Recorded {
    /// Builds a lab with a directory for captures, where every user may write.
    pub fn up(options: LabOptions) -> Result<Self> {
        let lab = Lab::up(options)?;
        let captures = lab.file("captures");
        fs::create_dir(&captures)?;
        fs::set_permissions(&captures, fs::Permissions::from_mode(0o1777))?;
        Ok(Self { lab, captures })
    }

    /// The directory of the captures.
    pub fn captures(&self) -> &Path {
        &self.captures
    }

    /// Lets the dissector read all captures. Returns the number of messages of each identifier; a message that both sides recorded
    /// counts twice. An error when the dissector complains.
    pub fn messages(&self) -> Result<BTreeMap<u8, usize>> {
        let entries: Vec<_> = fs::read_dir(&self.captures)?.collect::<Result<_, _>>()?;
        let next = AtomicUsize::new(0);
        let read = || {
            let mut found = Vec::new();
            while let Some(entry) = entries.get(next.fetch_add(1, Ordering::Relaxed)) {
                let path = entry.path();
                found.push(tshark::sdp_messages(&path).with_context(|| path.display().to_string())?);
            }
            Ok(found)
        };
        let results: Vec<Result<Vec<BTreeMap<u8, usize>>>> = thread::scope(|scope| {
            let readers = [(); READERS].map(|()| scope.spawn(read));
            readers.map(|reader| reader.join().unwrap_or_else(|_| Err(anyhow!("a reader panicked")))).into()
        });
        let mut sum = BTreeMap::new();
        for result in results {
            for (kind, messages) in result?.into_iter().flatten() {
                *sum.entry(kind).or_default() += messages;
            }
        }
        Ok(sum)
    }
}

impl Deref for Recorded {
    type Target = Lab;

    fn deref(&self) -> &Lab {
        &self.lab
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.messages().expect("SDP's dissector reads all captures");
        }
    }
}
