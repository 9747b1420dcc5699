//! What a newcomer does without root: the commands of README and of the guide, and `ci/demo --fabric`, run as a user without any
//! capability.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::env;
use std::ffi::OsString;
use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use xwarp_checks::documents::{CommandBlock, Place, ShownCommand, commands, root};
use xwarp_checks::lab::ci_script;
use xwarp_checks::process::Running;
use xwarp_checks::user::{LIMIT, User, finish, is_early};
use xwarp_checks::vm::built;

/// Programs of this build before the others, as after an installation.
fn search_path() -> OsString {
    let built = built("xwarp").unwrap();
    let mut path = OsString::from(built.parent().unwrap());
    path.push(":");
    path.push(env::var_os("PATH").unwrap_or_default());
    path
}

/// A command as a shell runs it; the example of a crate is built already.
fn shell(user: &User, line: &str) -> Command {
    if let Some((_, example)) = line.strip_prefix("cargo run ").and_then(|rest| rest.split_once("--example "))
    {
        return user.command(built(&format!("examples/{example}")).unwrap());
    }
    let mut command = user.command("bash");
    command.args(["-c", &format!("exec {line}")]).env("PATH", search_path());
    command
}

/// Runs the commands one after another. A client that comes before its server listens is started again, as a person does.
fn run(user: &User, CommandBlock { document, commands, .. }: &CommandBlock) {
    let mut serving: Vec<(&str, Running)> = Vec::new();
    for ShownCommand { line, background, .. } in commands {
        if *background {
            serving.push((line, Running::start(shell(user, line)).unwrap()));
            continue;
        }
        let end = Instant::now() + LIMIT;
        loop {
            let (success, said) = finish(Running::start(shell(user, line)).unwrap());
            if success {
                break;
            }
            let early = !serving.is_empty() && is_early(&said) && Instant::now() < end;
            assert!(early, "{document}: {line}: {said}");
            thread::sleep(Duration::from_millis(100));
        }
    }
    for (line, server) in serving {
        let (success, said) = finish(server);
        assert!(success, "{document}: {line} &: {said}");
    }
}

#[test]
fn fabric_commands_of_documents_run_as_an_ordinary_user() {
    let blocks = commands().unwrap();
    let blocks: Vec<_> = blocks.iter().filter(|block| block.place == Place::AsUser).collect();
    assert!(blocks.len() >= 4, "{blocks:?}");
    for (number, block) in blocks.iter().enumerate() {
        run(&User::new(&format!("documents{number}")), block);
    }
}

#[test]
fn fabric_demo_runs_as_an_ordinary_user() {
    let user = User::new("demo");
    let mut demo = user.command(ci_script("demo"));
    demo.arg("--programs").arg(built("xwarp").unwrap().parent().unwrap()).args([
        "--fabric",
        "--iterations",
        "5",
    ]);
    let (success, said) = finish(Running::start(demo).unwrap());
    assert!(success, "{said}");
    for words in
        ["8388608", "xwarp explain", "Send of 1000 bytes", "5x Send (5000 bytes)", "; closed by both ends"]
    {
        assert!(said.contains(words), "{words:?} is missing in\n{said}");
    }
}

/// The last step of the CI job that the guide shows, as its runner would run it.
#[test]
fn fabric_the_job_of_the_guide_succeeds() {
    let user = User::new("guide");
    let guide = fs::read_to_string(root().join("docs/guide/testing.md")).unwrap();
    let job = guide.split_once("```yaml\n").and_then(|(_, rest)| rest.split_once("```")).unwrap().0;
    let step = job.rsplit_once("- run: |\n").unwrap().1;
    assert!(step.contains("xwarp run --fabric"), "{step}");
    let mut command = user.command("sh");
    command.env("PATH", search_path()).args(["-e", "-c", step]);
    let (success, said) = finish(Running::start(command).unwrap());
    assert!(success, "{said}");
}

/// The picture in README is what `xwarp explain` prints today.
#[test]
fn fabric_the_picture_of_explain_is_current() {
    let user = User::new("picture");
    let file = user.directory().join("explain.svg");
    let mut picture = user.command(ci_script("picture"));
    picture.arg("--programs").arg(built("xwarp").unwrap().parent().unwrap()).arg(&file);
    let (success, said) = finish(Running::start(picture).unwrap());
    assert!(success, "{said}");
    let [drawn, kept] = [file, root().join("docs/explain.svg")].map(|file| fs::read_to_string(file).unwrap());
    assert!(drawn.contains("Send of 16 bytes, MSN 1"), "{drawn}");
    assert_eq!(drawn, kept, "ci/picture draws it again");
}
