//! Any text is either loaded or rejected with mistakes at positions within it, without a panic.

use std::{
    fs,
    sync::{Arc, LazyLock},
};

use axum::http::Method;
use lock_tower::LockPolicies;
use proptest::{prelude::*, sample::Index};

use super::{corpus::CORPUS, file::quoted};

const GOOD: &str = r#"routes."GET /served" = { key = "{header.x}" }"#;

/// Fragments of policy files, valid and invalid.
const PIECES: &[&str] = &[
    "[defaults]",
    "[groups.a]",
    "[groups]",
    "[routes]",
    "[[routes]]",
    "[routes.\"/a/{id}\"]",
    "[routes.\"POST /a\"]",
    "[routes.POST./a]",
    "routes.\"/b\" = ",
    "\"/c\" = ",
    "\"/{*rest}\" = ",
    "\"GET|POST /a-{id}/\" = ",
    "\"/{{}}\" = ",
    "key = ",
    "lease = ",
    "wait = ",
    "no_wait = ",
    "permits = ",
    "mode = ",
    "hold_until = ",
    "status = ",
    "group = ",
    "name = ",
    "skip = ",
    "max_hold = ",
    "min_hold = ",
    "global = ",
    "ttl = ",
    "{ busy = 423 }",
    "{ busy = -1 }",
    "{ key = \"{id}\" }",
    "{ key = '{header.x}' }",
    "\"a:{id}\"",
    "\"{a}{b}\"",
    "'''{id}'''",
    "\"\"\"\n{id}\\\n \"\"\"",
    "\"\\u0041\\uD800\"",
    "\"\\u0000\"",
    "\"shared\"",
    "\"5s\"",
    "\"584554049254y\"",
    "\"1e9s\"",
    "\"5 é\"",
    "\"\"",
    "true",
    "0",
    "-0",
    "0x10",
    "0b2",
    "1_000",
    "18446744073709551616",
    "+3",
    "1.5",
    "nan",
    "1979-05-27T07:32:00Z",
    "[",
    "]",
    "{",
    "}",
    "=",
    ",",
    ".",
    "#",
    "\"",
    "'",
    "\\",
    "\n",
    "\r\n",
    "\r",
    "\u{feff}",
    "\0",
    "\t",
    " ",
    "é",
    "𝄞",
    "\u{202e}",
    "\u{2028}",
    "a\u{301}",
    "{",
    "}}",
    "{{",
];

/// Replacements for tokens of a file.
const NASTY: &[&str] = &[
    "",
    "\"\"",
    "'",
    "\"",
    "\"\"\"",
    "=",
    "{",
    "}",
    "{}",
    "{{}}",
    "{*}",
    "{*x}",
    "{x}{y}",
    "/",
    "//",
    "/{",
    "/%",
    "\"é\n\"",
    "\r\n",
    "\u{feff}",
    "\0",
    "9999999999999999999999",
    "-1",
    "1e400",
    "\"1ns\"",
    "\"99999999999999999999s\"",
    "\"1y 1y\"",
    "true",
    "[[[[",
    "\\u{0}",
    "ÿ",
    "𝄞𝄞",
    "#",
    "{header.é}",
    "{query.}",
    "{grpc.method}",
    "permits:{x}",
];

/// The files of the corpus, valid and invalid, and that of the example.
static FILES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let files = fs::read_dir(CORPUS)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let texts = files.filter(|file| file.extension().is_some_and(|ending| ending == "toml"));
    let mut texts: Vec<_> = texts
        .map(|file| fs::read_to_string(file).unwrap())
        .collect();
    texts.sort();
    texts.push(include_str!("../../../../../examples/src/bin/orders/locks.toml").to_owned());
    texts
});

/// Splits the text into words, runs of spaces, and single other characters.
fn tokens(text: &str) -> Vec<String> {
    let kind = |c: char| match c {
        _ if c.is_alphanumeric() || c == '_' => 0,
        ' ' => 1,
        _ => 2,
    };
    let mut tokens: Vec<String> = Vec::new();
    let mut before = 2;
    for c in text.chars() {
        let this = kind(c);
        match tokens.last_mut() {
            Some(token) if this == before && this != 2 => token.push(c),
            _ => tokens.push(c.into()),
        }
        before = this;
    }
    tokens
}

#[derive(Clone, Debug)]
enum Change {
    Delete,
    Double,
    SwapWith(Index),
    Replace(Index),
    Insert(Index),
    Truncate,
}

fn change() -> impl Strategy<Value = (Change, Index)> {
    let change = prop_oneof![
        4 => Just(Change::Delete),
        3 => Just(Change::Double),
        3 => any::<Index>().prop_map(Change::SwapWith),
        4 => any::<Index>().prop_map(Change::Replace),
        3 => any::<Index>().prop_map(Change::Insert),
        1 => Just(Change::Truncate),
    ];
    (change, any::<Index>())
}

fn changed(text: &str, changes: &[(Change, Index)]) -> String {
    let mut tokens = tokens(text);
    for (change, at) in changes {
        if tokens.is_empty() {
            break;
        }
        let at = at.index(tokens.len());
        match change {
            Change::Delete => drop(tokens.remove(at)),
            Change::Double => tokens.insert(at, tokens[at].clone()),
            Change::SwapWith(other) => {
                let other = other.index(tokens.len());
                tokens.swap(at, other);
            }
            Change::Replace(with) => tokens[at] = NASTY[with.index(NASTY.len())].to_owned(),
            Change::Insert(what) => tokens.insert(at, PIECES[what.index(PIECES.len())].to_owned()),
            Change::Truncate => tokens.truncate(at),
        }
    }
    tokens.concat()
}

/// Loads `text`, or checks the reported mistakes and that existing policies are unchanged.
fn is_accepted_or_refused(text: &str) {
    let served = LockPolicies::from_toml_str(GOOD).unwrap();
    let before = served.find(&Method::GET, "/served").unwrap();
    match LockPolicies::from_toml_str(text) {
        Ok(policies) => {
            for path in [
                "", "*", "/", "/a", "/a/7", "/a-7/", "/{}", "/é", "//", "/served",
            ] {
                for method in [
                    Method::GET,
                    Method::HEAD,
                    Method::POST,
                    Method::from_bytes(b"PURGE").unwrap(),
                ] {
                    policies.find(&method, path);
                }
            }
            served.replace(text).unwrap();
        }
        Err(error) => {
            let mistakes = error.all();
            assert!(!mistakes.is_empty(), "{text:?}");
            assert_eq!(error.to_string().lines().count(), mistakes.len(), "{error}");
            assert!(
                mistakes.is_sorted_by_key(|mistake| (mistake.line, mistake.column)),
                "{error}"
            );
            let lines: Vec<_> = text.split('\n').collect();
            for mistake in mistakes {
                assert!(
                    (1..=lines.len()).contains(&mistake.line),
                    "{mistake:?} of {text:?}"
                );
                // A mistake at the end of a line is one column after it.
                let columns = 1..=lines[mistake.line - 1].chars().count() + 1;
                assert!(columns.contains(&mistake.column), "{mistake:?} of {text:?}");
                assert!(
                    !mistake.message.is_empty() && !mistake.message.contains(char::is_control),
                    "{mistake:?}"
                );
            }
            assert!(served.replace(text).is_err());
            let after = served.find(&Method::GET, "/served").unwrap();
            assert!(
                Arc::ptr_eq(&before, &after),
                "an invalid text changed the policies: {text:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes_are_accepted_or_refused_with_their_place(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        is_accepted_or_refused(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn any_text_is_accepted_or_refused_with_its_place(text in "(?s).{0,200}") {
        is_accepted_or_refused(&text);
    }

    #[test]
    fn pieces_of_files_are_accepted_or_refused_with_their_place(
        pieces in proptest::collection::vec((proptest::sample::select(PIECES), prop::bool::weighted(0.3)), 0..40),
    ) {
        let text: String = pieces.into_iter().flat_map(|(piece, ends)| [piece, if ends { "\n" } else { " " }]).collect();
        is_accepted_or_refused(&text);
    }

    #[test]
    fn a_file_with_slips_is_accepted_or_refused_with_its_place(
        which: Index,
        changes in proptest::collection::vec(change(), 1..6),
        crlf: bool,
    ) {
        let text = changed(&FILES[which.index(FILES.len())], &changes);
        is_accepted_or_refused(&if crlf { text.replace('\n', "\r\n") } else { text });
    }

    #[test]
    fn a_string_in_any_place_is_accepted_or_refused_with_its_place(route in "(?s).{0,12}|(GET )?/[a-c{}*/%|.-]{0,12}", value in "(?s).{0,12}|[a-c{}.:]{0,12}") {
        for field in ["key", "lease", "name", "mode", "group", "unknown"] {
            is_accepted_or_refused(&format!("[routes.{}]\nglobal = true\nkey = 'k'\n{field} = {}", quoted(&route), quoted(&value)));
            is_accepted_or_refused(&format!("[routes.{}]\n{field} = {}\n{} = 1", quoted(&route), quoted(&value), quoted(&value)));
        }
    }
}

#[test]
fn depth_and_length_are_no_reason_to_fall() {
    let many = 50_000;
    for (open, close) in [
        ("[", ""),
        ("[", "]"),
        ("{ a = ", ""),
        ("{ a = ", "}"),
        ("a.", ""),
        ("\"a\".", "b = 1"),
        ("[a]\n", ""),
        ("[[a]]\n", ""),
        ("=\n", ""),
        ("\"", ""),
        ("é", ""),
    ] {
        let nested = open.repeat(many) + &close.repeat(many);
        for before in [
            "",
            "[",
            "a = ",
            "[routes.\"/a\"]\nkey = ",
            "[routes.\"/a\"]\nstatus = ",
            "[routes.\"/a\"]\n",
        ] {
            is_accepted_or_refused(&format!("{before}{nested}"));
        }
    }
    let long = "x".repeat(100_000);
    is_accepted_or_refused(&format!("[routes.\"/{long}\"]\nkey = \"{{header.x}}\""));
    is_accepted_or_refused(&format!("[routes.\"/a\"]\nkey = \"{long}{{header.x}}\""));
    for params in [24, 25, 26, 27, 100] {
        let path: String = (0..params)
            .map(|number| format!("/{{p{number}}}"))
            .collect();
        is_accepted_or_refused(&format!("[routes.\"{path}\"]\nkey = \"{{p0}}\""));
        is_accepted_or_refused(&format!("[routes.\"{path}/{{*rest}}\"]\nkey = \"{{p0}}\""));
    }
}

#[test]
fn a_byte_order_mark_and_other_line_ends_change_nothing() {
    for file in FILES
        .iter()
        .filter(|file| LockPolicies::from_toml_str(file).is_ok())
    {
        for text in [format!("\u{feff}{file}"), file.replace('\n', "\r\n")] {
            LockPolicies::from_toml_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        }
    }
}
