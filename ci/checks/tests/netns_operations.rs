//! Operations of hosts and networks under kernel TCP and xwarp side by side: no outcome of ours is worse without a reason that stands with the
//! operation in `ci/checks/operations`. `ci/operations` prints the table.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use xwarp_checks::operations::{Operation, Row, Runner};

/// The programs own their interfaces, or share them. Each lab's traffic leaves most of a CPU to the others.
fn runner(shared: bool) -> Runner {
    Runner {
        program: env!("CARGO_BIN_EXE_xwarp-operations").into(),
        helper: shared.then(|| env!("CARGO_BIN_EXE_xwarp-helper").into()),
        parallel: 4,
    }
}

/// Runs the operations, once more those that were worse: other tests may have kept our two programs from running for a time, and the
/// kernel's stack has no program to run.
fn none_is_worse(runner: &Runner, mut operations: Vec<Operation>) {
    for last in [false, true] {
        let rows = runner.run_all(operations).unwrap();
        assert!(rows.iter().any(Row::ran), "no operation ran");
        let worse: Vec<_> = rows.into_iter().filter(Row::is_worse_without_reason).collect();
        if worse.is_empty() {
            return;
        }
        let texts: Vec<String> = worse.iter().map(ToString::to_string).collect();
        assert!(!last, "{}", texts.join("\n"));
        operations = worse.into_iter().map(|row| row.operation).collect();
    }
}

fn quick(quick: bool) -> Vec<Operation> {
    Operation::all().unwrap().into_iter().filter(|it| it.quick == quick).collect()
}

#[test]
fn netns_network_operations_are_survived_as_by_kernel_tcp() {
    none_is_worse(&runner(false), quick(true));
}

#[test]
fn netns_shared_operations_are_survived_as_by_kernel_tcp() {
    none_is_worse(&runner(true), quick(true));
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_network_other_operations_are_survived_as_by_kernel_tcp() {
    none_is_worse(&runner(false), quick(false));
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_shared_other_operations_are_survived_as_by_kernel_tcp() {
    none_is_worse(&runner(true), quick(false));
}
