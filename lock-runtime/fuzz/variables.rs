//! Environment variables.

use super::{Settings, VARIABLES};
use crate::fuzz::{SECRET, refused_readably, within_bounds};

/// Each line is a variable without the common prefix, as in `WAIT=2s`.
#[test]
fn settings() {
    bolero::check!().for_each(|input: &[u8]| {
        let text = String::from_utf8_lossy(input);
        if text.contains(SECRET) {
            return;
        }
        let lines = text.lines().filter_map(|line| line.split_once('='));
        let given = lines.map(|(name, value)| (format!("LOCK_{name}"), value.to_owned()));
        let url = ("LOCK_URL".to_owned(), format!("redis://:{SECRET}@host"));
        let given = [url].into_iter().chain(given);
        // Those name files, which are read.
        let is_file = |name: &str| {
            let known = VARIABLES.iter().find(|known| known.name == name);
            known.is_some_and(|known| known.example.starts_with('/'))
        };
        let given = given.filter(|(name, _)| !is_file(name));
        let given: Vec<_> = given
            .map(|(name, value)| (name.into(), value.into()))
            .collect();
        let read = within_bounds(input, || Settings::read(given));
        if let Err(error) = &read {
            let shown = format!("{error:?}");
            assert!(!shown.contains(SECRET), "{shown}");
        }
        refused_readably(read);
    });
}
