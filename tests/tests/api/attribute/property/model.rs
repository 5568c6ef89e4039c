//! The expected outcome of a case, derived from the output of `format!` for the same string, values
//! and arguments.
//!
//! `format!` writes every value between marks, so its output separates text from values without a
//! parser for format strings. The `KeyWriter` of the runtime builds the key from it.

use std::collections::BTreeSet;

use lock_runtime::{KeyWriter, LockError, LockKey};

use super::{
    project::Complaint,
    written::{KeysForm, Written, WrittenKey, WrittenTemplate},
};

/// The marks before and after a value.
const OPEN: char = '\u{E000}';
const CLOSE: char = '\u{E001}';
const MAX_KEY_BYTES: usize = 512;

#[derive(Debug)]
pub(super) enum Expected {
    /// The case does not compile. The error is one of the attribute or about the format string, and
    /// has no code; or it has one of these codes, as for `format!`.
    Refused { codes: BTreeSet<String> },
    /// The body runs, under these keys and with these arguments.
    Runs {
        keys: Vec<String>,
        arguments: Vec<String>,
    },
    /// The call returns `InvalidKey`.
    InvalidKey,
}

/// A piece of the output of `format!`.
#[derive(Debug, PartialEq)]
enum Piece {
    Text(String),
    Value(String),
}

/// The expected outcome of a case whose `format!` does not compile.
pub(super) fn of_refused(written: &Written, complaints: &[Complaint]) -> Result<Expected, String> {
    let codes: BTreeSet<&str> = complaints
        .iter()
        .filter_map(|complaint| complaint.code.as_deref())
        .collect();
    let expected: BTreeSet<&str> = ["E0277", "E0308", "E0423", "E0424", "E0425"].into();
    let from_arguments = templates(written).any(|template| template.counted);
    if !codes.is_subset(&expected) || (codes.contains("E0308") && !from_arguments) {
        let rendered: String = complaints
            .iter()
            .map(|complaint| complaint.rendered.as_str())
            .collect();
        return Err(format!("the reference should compile:\n{rendered}"));
    }
    // The attribute refuses a name that is no argument, with a message of its own. It does not
    // check names that begin like a constant, nor functions in which a macro may hide arguments.
    let unknown: Vec<&Complaint> = complaints
        .iter()
        .filter(|complaint| matches!(complaint.code.as_deref(), Some("E0423" | "E0424" | "E0425")))
        .collect();
    let of_the_attribute = unknown.iter().any(|complaint| {
        let name = complaint.message.split('`').nth(1).unwrap_or_default();
        name.starts_with(|first: char| first == '_' || first.is_lowercase())
    });
    let mut codes: BTreeSet<String> = codes
        .iter()
        .filter(|code| **code == "E0277")
        .map(ToString::to_string)
        .collect();
    if !unknown.is_empty() && (written.hides_arguments() || !of_the_attribute) {
        codes.extend(
            unknown
                .iter()
                .filter_map(|complaint| complaint.code.clone()),
        );
        // From another placeholder: the compiler does not check the rest of a single `format!`, but
        // the expansion has one `format_args!` per placeholder.
        codes.insert("E0277".into());
    }
    if complaints
        .iter()
        .any(|complaint| complaint.message.starts_with("invalid format string"))
    {
        // As above.
        codes.extend(["E0277", "E0423", "E0425"].map(String::from));
    }
    Ok(Expected::Refused { codes })
}

/// The expected outcome of a case whose `format!` has printed this.
pub(super) fn of_printed(written: &Written, printed: &[(char, String)]) -> Expected {
    let tagged = |wanted: char| {
        printed
            .iter()
            .filter(move |(tag, _)| *tag == wanted)
            .map(|(_, text)| text)
    };
    let pieces: Vec<Vec<Piece>> = tagged('k').map(|text| pieces(text)).collect();
    if refused_of_itself(written, &pieces) {
        return Expected::Refused {
            codes: BTreeSet::new(),
        };
    }
    let named = pieces.iter().map(|pieces| name(pieces));
    let expressions = tagged('e').map(|text| LockKey::new(text.as_str()));
    let keys: Result<Vec<LockKey>, LockError> = named.chain(expressions).collect();
    match keys {
        Ok(keys) if !keys.is_empty() => Expected::Runs {
            keys: keys.iter().map(ToString::to_string).collect(),
            arguments: tagged('a').cloned().collect(),
        },
        _ => Expected::InvalidKey,
    }
}

/// Returns whether the attribute refuses a case that `format!` accepts.
fn refused_of_itself(written: &Written, keys: &[Vec<Piece>]) -> bool {
    let constant = keys
        .iter()
        .any(|pieces| pieces.iter().all(|piece| matches!(piece, Piece::Text(_))));
    let misplaced = if written.global {
        !keys.is_empty() && !constant
    } else {
        constant
    };
    misplaced
        || written.guard_hides_an_argument()
        || (written.form == KeysForm::Several && written.keys.is_empty())
        || written
            .keys
            .iter()
            .any(|key| matches!(key, WrittenKey::Literal(_)))
        || templates(written)
            .any(|template| template.text.is_empty() || template.counted || template.named_by_place)
        || keys.iter().any(|pieces| is_never_a_key(pieces))
}

fn templates(written: &Written) -> impl Iterator<Item = &WrittenTemplate> {
    written.keys.iter().filter_map(|key| match key {
        WrittenKey::Template(template) => Some(template),
        _ => None,
    })
}

/// Returns whether the pieces are an invalid key for all values.
fn is_never_a_key(pieces: &[Piece]) -> bool {
    let texts = pieces.iter().filter_map(|piece| match piece {
        Piece::Text(text) => Some(text.as_str()),
        Piece::Value(_) => None,
    });
    let any: String = pieces
        .iter()
        .map(|piece| {
            if let Piece::Text(text) = piece {
                text
            } else {
                "v"
            }
        })
        .collect();
    let tag = any
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map_or("", |(tag, _)| tag);
    texts.map(str::len).sum::<usize>() > MAX_KEY_BYTES
        || any.contains(char::is_control)
        || (any.contains('}') && tag.is_empty())
        || any.starts_with("permits:")
}

fn name(pieces: &[Piece]) -> Result<LockKey, LockError> {
    let mut writer = KeyWriter::new();
    for piece in pieces {
        match piece {
            Piece::Text(text) => writer.lit(text),
            Piece::Value(value) => writer.arg(format_args!("{value}")),
        };
    }
    writer.finish()
}

/// Splits text with marks into pieces. A value within a value is part of the outer one.
fn pieces(marked: &str) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut text, mut depth) = (String::new(), 0);
    for char in marked.chars() {
        match char {
            OPEN => {
                if depth == 0 && !text.is_empty() {
                    pieces.push(Piece::Text(std::mem::take(&mut text)));
                }
                depth += 1;
            }
            CLOSE => {
                depth -= 1;
                if depth == 0 {
                    pieces.push(Piece::Value(std::mem::take(&mut text)));
                }
            }
            char => text.push(char),
        }
    }
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
    pieces
}

#[test]
fn text_and_values_differ_by_their_marks() {
    let marked = format!("a{OPEN}1{OPEN}2{CLOSE}{CLOSE}{OPEN}{CLOSE}b:");
    let expected = [
        Piece::Text("a".into()),
        Piece::Value("12".into()),
        Piece::Value("".into()),
        Piece::Text("b:".into()),
    ];
    assert_eq!(pieces(&marked), expected);
}
