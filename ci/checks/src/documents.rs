//! [`commands`]: the commands that README and the guide show, for the tests that run them.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};

/// How a block of commands is tested, the word behind ```` ```sh ````.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// `as-user`: run one after another by an ordinary user, over the fabric.
    AsUser,
    /// `two-hosts`: run in a lab.
    TwoHosts,
    /// `not-run`: only the names of scripts and options are checked.
    NotRun,
}

/// A block of commands in a document.
#[derive(Debug)]
pub struct CommandBlock {
    /// The document, below the root of the repository.
    pub document: String,
    /// Where it is run.
    pub place: Place,
    /// Its commands, without comments.
    pub commands: Vec<ShownCommand>,
}

/// A command that a document shows.
#[derive(Debug)]
pub struct ShownCommand {
    /// The command.
    pub line: String,
    /// Whether it goes on in the background: the line ends with `&`.
    pub background: bool,
    /// The comment behind it.
    pub comment: String,
}

/// The root of the repository.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// README and the pages of the guide.
pub fn documents() -> Result<Vec<String>> {
    let pages = fs::read_dir(root().join("docs/guide")).context("docs/guide")?;
    let mut found = vec!["README.md".to_owned()];
    for page in pages {
        let name = page?.file_name().into_string().ok().context("a name that is no text")?;
        if Path::new(&name).extension().is_some_and(|extension| extension == "md") {
            found.push(format!("docs/guide/{name}"));
        }
    }
    found.sort();
    Ok(found)
}

/// All blocks of commands. A block without a place, or commands outside of a block, are an error.
pub fn commands() -> Result<Vec<CommandBlock>> {
    let mut blocks = Vec::new();
    for document in documents()? {
        let text = fs::read_to_string(root().join(&document)).with_context(|| document.clone())?;
        let mut language: Option<&str> = None;
        for line in text.lines() {
            if let Some(after) = line.strip_prefix("```") {
                language = if language.is_some() { None } else { Some(after) };
                if let Some(place) = language.and_then(|language| language.strip_prefix("sh")) {
                    let place = self::place(place.trim()).with_context(|| format!("{document}: {line}"))?;
                    blocks.push(CommandBlock { document: document.clone(), place, commands: Vec::new() });
                }
                continue;
            }
            let indented = line.starts_with("    ") && !line.trim_start().starts_with(['-', '|']);
            ensure!(language.is_some() || !indented, "{document}: commands belong into a block: {line}");
            if language.is_some_and(|language| language.starts_with("sh"))
                && let Some(block) = blocks.last_mut()
                && let Some(shown) = shown(line)
            {
                block.commands.push(shown);
            }
        }
    }
    Ok(blocks)
}

fn place(word: &str) -> Result<Place> {
    Ok(match word {
        "as-user" => Place::AsUser,
        "two-hosts" => Place::TwoHosts,
        "not-run" => Place::NotRun,
        _ => anyhow::bail!("a block of commands is as-user, two-hosts or not-run"),
    })
}

fn shown(line: &str) -> Option<ShownCommand> {
    let (line, comment) = line.split_once(" #").unwrap_or((line, ""));
    let line = line.trim();
    let command = line.strip_suffix('&').unwrap_or(line).trim();
    (!command.is_empty() && !command.starts_with('#')).then(|| ShownCommand {
        line: command.to_owned(),
        background: line.ends_with('&'),
        comment: comment.trim().to_owned(),
    })
}
