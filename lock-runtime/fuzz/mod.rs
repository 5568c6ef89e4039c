//! Fuzzing of all that parses. Targets of private parsers are modules beside them.

mod promises;
#[cfg(all(feature = "http", feature = "serde"))]
mod texts;

#[cfg_attr(not(feature = "redis"), allow(unused_imports))]
pub(crate) use promises::{is_readable, refused_readably, within_bounds};

/// The password in the URLs. No error and no address shows it.
pub(crate) const SECRET: &str = "hunter2";

/// A URL with the password at the end of its first line, and the rest behind it. `None` if it has
/// the password elsewhere: the fuzzer finds it out.
pub(crate) fn with_password(scheme: &str, input: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(input);
    let url = match text.split_once('\n') {
        Some((before, after)) => format!("{scheme}{before}:{SECRET}@{after}"),
        None => text.to_string(),
    };
    // Parsers of URLs leave line breaks out, so the rest of the text may be that word as well.
    let rest: String = text.chars().filter(|c| !c.is_control()).collect();
    (!rest.contains(SECRET)).then_some(url)
}
