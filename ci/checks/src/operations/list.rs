//! The operations: functions in the shell scripts of `ci/checks/operations`. The comment above a function tells what it does; its last lines may
//! hold settings.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};

/// The folder of the scripts.
pub(super) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("operations")
}

/// What lies between the two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// A cable.
    Direct,
    /// A router, the lab's hop.
    Routed,
}

/// An operation of a host or a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Name of the function.
    pub name: String,
    /// The comment above it.
    pub what: String,
    /// The file's name without its ending: what is operated.
    pub group: String,
    /// `# network: routed`; a cable without it.
    pub network: Network,
    /// `# seconds: N`: how long the traffic runs; 6 without it.
    pub seconds: u64,
    /// `# queues: N`: queues of the interfaces; 1 without it.
    pub queues: u32,
    /// `# servers: ADDRESS...`: where the client connects; the server's IPv4 and IPv6 address without it.
    pub servers: Vec<IpAddr>,
    /// `# quick`: runs each time, not only with the slow tests.
    pub quick: bool,
    /// `# worse: REASON`: why xwarp may do worse than kernel TCP.
    pub reason: Option<String>,
    /// `# worse shared: REASON`: the same, only for interfaces that are shared.
    pub reason_shared: Option<String>,
}

impl Operation {
    /// All of them, in the order of the files and of the functions.
    pub fn all() -> Result<Vec<Self>> {
        let entries = fs::read_dir(folder()).context("cannot list the scripts")?;
        let mut paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
        paths.sort();
        let mut all = Vec::new();
        for path in paths.iter().filter(|path| !path.ends_with("lab.sh")) {
            let group = path.file_stem().and_then(|stem| stem.to_str()).context("a file's name")?;
            all.extend(parse(group, &super::read(path)?).with_context(|| format!("in {}", path.display()))?);
        }
        Ok(all)
    }

    fn new(group: &str, name: &str, comment: &[&str]) -> Result<Self> {
        let mut it = Self {
            name: name.to_owned(),
            what: String::new(),
            group: group.to_owned(),
            network: Network::Direct,
            seconds: 6,
            queues: 1,
            servers: vec![IpAddr::from([10, 77, 0, 2]), IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, 2])],
            quick: false,
            reason: None,
            reason_shared: None,
        };
        let mut words = Vec::new();
        for line in comment {
            match line.split_once(": ").unwrap_or((line, "")) {
                ("network", "routed") => it.network = Network::Routed,
                ("seconds", seconds) => it.seconds = seconds.parse().context("seconds")?,
                ("queues", queues) => it.queues = queues.parse().context("queues")?,
                ("servers", servers) => {
                    it.servers =
                        servers.split(' ').map(str::parse).collect::<Result<_, _>>().context("servers")?;
                }
                ("quick", "") => it.quick = true,
                ("worse", reason) => it.reason = Some(reason.to_owned()),
                ("worse shared", reason) => it.reason_shared = Some(reason.to_owned()),
                _ => words.push(*line),
            }
        }
        it.what = words.join(" ");
        ensure!(!it.what.is_empty(), "{name} has no comment");
        Ok(it)
    }
}

/// The operations of one script.
fn parse(group: &str, text: &str) -> Result<Vec<Operation>> {
    let (mut all, mut comment) = (Vec::new(), Vec::new());
    for line in text.lines() {
        if let Some(words) = line.strip_prefix("# ") {
            comment.push(words);
        } else if let Some((name, _)) = line.split_once("() {") {
            if name.contains(char::is_whitespace) {
                bail!("not a function: {line}");
            }
            all.push(Operation::new(group, name, &comment)?);
            comment.clear();
        } else {
            comment.clear();
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_has_its_comment_and_its_settings() {
        let text = "#!/bin/bash\n# About the file.\n\n# The address goes\n# and comes back.\n# network: routed\n# seconds: 9\n\
                    # quick\n# worse: because\nadd_it() {\n    a ip addr\n}\n";
        let [it] = &*parse("addresses", text).unwrap() else { panic!("one operation") };
        assert_eq!((it.name.as_str(), it.what.as_str()), ("add_it", "The address goes and comes back."));
        assert_eq!((it.network, it.seconds, it.queues, it.quick), (Network::Routed, 9, 1, true));
        assert_eq!(it.reason.as_deref(), Some("because"));
    }

    #[test]
    fn a_function_without_a_comment_is_an_error() {
        assert!(parse("addresses", "add_it() {\n}\n").is_err());
    }

    #[test]
    fn every_operation_can_be_read_and_has_a_name_of_its_own() {
        let all = Operation::all().unwrap();
        let names: std::collections::BTreeSet<_> = all.iter().map(|it| &it.name).collect();
        assert_eq!(names.len(), all.len());
        assert!(all.iter().any(|it| it.quick));
    }
}
