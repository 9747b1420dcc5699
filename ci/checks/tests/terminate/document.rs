//! `docs/measurements/terminate.md`: the tables that the tests compare or write.

use std::{
    env, fs,
    path::Path,
    sync::{Mutex, PoisonError},
};

use xwarp_checks::hostile::Terminate;

use super::cases::Case;

/// Formats the row of a case.
pub fn row(case: &Case, came: &Terminate) -> String {
    let Case { sent, rule, numbers: promised, .. } = case;
    format!("| {sent} | {rule} | {} | {} |", expected(*promised), numbers(came))
}

/// Formats layer, type and code of a received Terminate, and its header control bits.
pub fn numbers(came: &Terminate) -> String {
    let (layer, error_type, code) = came.numbers;
    let parts = [(came.length.is_some(), 'M'), (came.ddp.is_some(), 'D'), (came.rdma.is_some(), 'R')];
    let bits: String = parts.iter().map(|(set, name)| if *set { *name } else { '-' }).collect();
    format!("{layer} {error_type} {code:02x} {bits}")
}

/// Formats layer, type and code with the RFCs' names.
pub fn expected((layer, error_type, code): (u8, u8, u8)) -> String {
    let name = match (layer, error_type, code) {
        (0, 1, 0x00) => "remote protection: invalid STag",
        (0, 1, 0x01) => "remote protection: base or bounds violation",
        (0, 1, 0x02) => "remote protection: access rights violation",
        (0, 1, 0x03) => "remote protection: STag not associated with the stream",
        (0, 1, 0x04) => "remote protection: TO wrap",
        (0, 1, 0x09) => "remote protection: STag cannot be invalidated",
        (0, 2, 0x05) => "remote operation: invalid RDMAP version",
        (0, 2, 0x06) => "remote operation: unexpected opcode",
        (0, 2, 0x07) => "remote operation: catastrophic, localized to the stream",
        (1, 0, _) => "DDP: local catastrophic",
        (1, 1, 0x00) => "tagged: invalid STag",
        (1, 1, 0x01) => "tagged: base or bounds violation",
        (1, 1, 0x02) => "tagged: STag not associated with the stream",
        (1, 1, 0x03) => "tagged: TO wrap",
        (1, 1, 0x04) => "tagged: invalid DDP version",
        (1, 2, 0x01) => "untagged: invalid QN",
        (1, 2, 0x02) => "untagged: invalid MSN, no buffer available",
        (1, 2, 0x03) => "untagged: invalid MSN, range not valid",
        (1, 2, 0x04) => "untagged: invalid MO",
        (1, 2, 0x05) => "untagged: message too long for the buffer",
        (1, 2, 0x06) => "untagged: invalid DDP version",
        (2, 0, 0x01) => "MPA: TCP connection closed",
        (2, 0, 0x02) => "MPA: CRC",
        (2, 0, 0x03) => "MPA: marker and ULPDU length disagree",
        (2, 0, 0x06) => "MPA: insufficient IRD",
        (2, 0, 0x07) => "MPA: no matching RTR",
        _ => panic!("an error without a name"),
    };
    format!("{layer} {error_type} {code:02x} {name}")
}

/// Compares one table of the document with `rows`, or writes it.
pub fn check(table: &str, rows: &[String]) {
    // The tests of this process write one at a time.
    static WRITING: Mutex<()> = Mutex::new(());
    let _one = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/measurements/terminate.md");
    let text = fs::read_to_string(&path).unwrap();
    let mark = |which| format!("<!-- {table}: {which} -->\n");
    let (before, rest) = text.split_once(&mark("begin")).expect("the table begins");
    let (old, after) = rest.split_once(&mark("end")).expect("the table ends");
    let (head, old_rows) = old.split_at(old.match_indices('\n').nth(1).expect("a head of two lines").0 + 1);
    let rows = rows.join("\n") + "\n";
    if env::var_os("XWARP_WRITE_TABLES").is_some() {
        fs::write(&path, [before, &mark("begin"), head, &rows, &mark("end"), after].concat()).unwrap();
    } else {
        assert_eq!(old_rows, rows, "docs/measurements/terminate.md; XWARP_WRITE_TABLES=1 writes it");
    }
}
