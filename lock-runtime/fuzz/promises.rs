//! The promises that every parser keeps for any input: no panic, an end in time, memory in
//! proportion to the input, and errors that can be printed.
//!
//! Each target is an ordinary test, which parses its corpus (`__fuzz__`), and random inputs for a
//! second. `tests/run.sh --fuzz 600` lets libFuzzer look for inputs of each target that reach more
//! of the code, for ten minutes.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

/// Far longer than any of the parsers takes, on a machine that is busy.
const LONGEST: Duration = Duration::from_secs(5);
/// The bytes of memory that a parser takes at most, and further ones for each byte of its input.
const MEMORY: u64 = 1 << 20;
const MEMORY_OF_A_BYTE: u64 = 256;
/// The bytes of an error at most: two texts of bounded length, and what stands between them.
const LONGEST_ERROR: usize = 16_400;

/// Parses the input, and checks the time and the memory.
#[track_caller]
pub(crate) fn within_bounds<T>(input: &[u8], parse: impl FnOnce() -> T) -> T {
    let (begun, mut parsed) = (Instant::now(), None);
    let taken = allocation_counter::measure(|| parsed = Some(parse())).bytes_max;
    let took = begun.elapsed();
    assert!(took < LONGEST, "{took:?} for {} bytes", input.len());
    let allowed = MEMORY + MEMORY_OF_A_BYTE * input.len() as u64;
    assert!(
        taken <= allowed,
        "{taken} bytes of memory for {}",
        input.len()
    );
    parsed.expect("it was parsed")
}

/// Checks that a text can be shown in a line of a log.
#[track_caller]
pub(crate) fn is_readable(shown: &impl Display) {
    let text = shown.to_string();
    assert!(!text.contains(char::is_control), "{text:?}");
    let length = text.len();
    assert!(length <= LONGEST_ERROR, "{length} bytes: {text}");
}

/// The value, or nothing for an error that can be shown.
#[track_caller]
pub(crate) fn refused_readably<T, E: Display>(parsed: Result<T, E>) -> Option<T> {
    parsed.map_err(|error| is_readable(&error)).ok()
}
