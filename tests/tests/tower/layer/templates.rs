//! Key templates with arbitrary text, values and requests: no panic, and no request has the key of
//! another.
//!
//! `tests/corpus/templates` has an unusual template on each line. They are parsed as they are and
//! after random changes. A text that was once parsed wrongly belongs there. `PROPTEST_CASES` sets
//! the number of cases.

mod requests;
mod written;

use std::{fs, path::Path};

use lock_tower::KeyTemplate;
use proptest::{prelude::*, sample::Index, test_runner::Config};

fn config() -> Config {
    Config {
        failure_persistence: None,
        ..Config::default()
    }
}

fn corpus() -> Vec<String> {
    let files =
        fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/templates")).unwrap();
    let texts = files.map(|file| fs::read_to_string(file.unwrap().path()).unwrap());
    let lines: Vec<_> = texts
        .flat_map(|text| text.split('\n').map(str::to_owned).collect::<Vec<_>>())
        .collect();
    assert!(lines.len() > 100, "{} lines", lines.len());
    lines
}

/// Checks the guarantees for any text, valid or not.
fn check(text: &str) -> Result<(), TestCaseError> {
    match KeyTemplate::new(text) {
        Ok(template) => {
            prop_assert_eq!(template.to_string(), text);
            prop_assert_eq!(text.parse::<KeyTemplate>().unwrap().to_string(), text);
            let shown = format!("{template:?}");
            prop_assert!(shown.starts_with("KeyTemplate("), "{}", shown);
        }
        Err(error) => {
            // The position of a wrong brace, or 0 for the whole text.
            let rest = text.get(error.at()..);
            prop_assert!(
                rest.is_some_and(|rest| error.at() == 0 || rest.starts_with(['{', '}'])),
                "{}",
                error
            );
            let message = error.to_string();
            let quoted = lock_runtime::text::message(format!("{text:?}"));
            prop_assert!(
                message.starts_with(&format!("key template {quoted}, byte {}: ", error.at())),
                "{message}"
            );
            prop_assert!(!message.ends_with(": "), "{message}");
        }
    }
    Ok(())
}

#[test]
fn each_text_of_the_corpus_is_taken_or_refused() {
    let lines = corpus();
    for line in &lines {
        check(line).unwrap();
    }
    let taken = lines
        .iter()
        .filter(|line| KeyTemplate::new(line).is_ok())
        .count();
    assert!(
        (30..lines.len() - 30).contains(&taken),
        "{taken} of {} templates are valid: too few or too many",
        lines.len()
    );
}

/// A change of a text.
#[derive(Clone, Debug)]
enum Change {
    Insert(Index, String),
    Remove(Index, usize),
    Repeat(Index, usize),
    /// Replaces the rest with the end of another text.
    Splice(Index, Index, Index),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        (any::<Index>(), piece()).prop_map(|(at, text)| Change::Insert(at, text)),
        (any::<Index>(), 1..4usize).prop_map(|(at, count)| Change::Remove(at, count)),
        (any::<Index>(), 1..4usize).prop_map(|(at, count)| Change::Repeat(at, count)),
        any::<(Index, Index, Index)>()
            .prop_map(|(at, other, from)| Change::Splice(at, other, from)),
    ]
}

/// Syntax of templates, and arbitrary characters.
fn piece() -> impl Strategy<Value = String> {
    const WORDS: &[&str] = &[
        "{",
        "}",
        "{{",
        "}}",
        ".",
        "*",
        ":",
        "/",
        "%",
        "%.",
        "header.",
        "query.",
        "grpc.",
        "{id}",
        "{method}",
        "permits",
        "permits:",
        "{header.a}",
        "{query.a}",
        "\0",
        "\u{e9}",
        "\u{1f512}",
    ];
    prop_oneof![4 => proptest::sample::select(WORDS).prop_map(str::to_owned), 1 => any::<char>().prop_map(String::from)]
}

impl Change {
    fn apply(&self, text: &str, lines: &[String]) -> String {
        let mut chars: Vec<char> = text.chars().collect();
        let place = |at: &Index| at.index(chars.len() + 1);
        match self {
            Self::Insert(at, piece) => {
                let at = place(at);
                chars.splice(at..at, piece.chars());
            }
            Self::Remove(at, count) => {
                let at = place(at);
                chars.drain(at..chars.len().min(at + count));
            }
            Self::Repeat(at, count) => {
                let at = place(at);
                let again = chars[at..].repeat(*count);
                chars.extend(again);
            }
            Self::Splice(at, other, from) => {
                let other: Vec<char> = other.get(lines).chars().collect();
                chars.truncate(place(at));
                chars.extend(&other[from.index(other.len() + 1)..]);
            }
        }
        chars.into_iter().collect()
    }
}

#[test]
fn a_changed_text_of_the_corpus_is_taken_or_refused() {
    let lines = corpus();
    let cases = (any::<Index>(), proptest::collection::vec(change(), 1..5));
    // A case takes microseconds.
    let config = Config {
        cases: config().cases * 20,
        ..config()
    };
    let run = proptest::test_runner::TestRunner::new(config).run(&cases, |(line, changes)| {
        let text = changes
            .iter()
            .fold(line.get(&lines).clone(), |text, change| {
                change.apply(&text, &lines)
            });
        check(&text)
    });
    run.unwrap();
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_text_is_taken_or_refused(text in any::<String>()) {
        check(&text)?;
    }

    #[test]
    fn any_pieces_of_a_template_are_taken_or_refused(pieces in proptest::collection::vec(piece(), 0..200)) {
        check(&pieces.concat())?;
    }
}
