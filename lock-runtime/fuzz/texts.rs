//! Names, durations, identifiers, cursors and refusals: what a user or another program writes.

use std::time::Duration;

use futures_util::FutureExt as _;

use super::{is_readable, refused_readably, within_bounds};
use crate::{
    ErrorClass, KeyWriter, LockKey, LockSpec, RequestName,
    operator::HolderId,
    request::spec::parse_duration,
    store::{ClientId, Cursor, MemoryStore, Store as _, Token, presentable},
    text::{brief, in_line, visible},
    web::{GrpcCode, Problem, retry_info},
};

#[test]
fn keys() {
    bolero::check!().for_each(|input: &[u8]| {
        let text = String::from_utf8_lossy(input);
        within_bounds(input, || {
            let Some(key) = refused_readably(LockKey::new(&*text)) else {
                return;
            };
            assert_eq!(key.to_string().parse::<LockKey>().unwrap(), key);
            is_readable(&key.shown());
            let json = serde_json::to_string(&key).unwrap();
            assert_eq!(serde_json::from_str::<LockKey>(&json).unwrap(), key);
        });
        // Values that differ give keys that differ, whatever they contain.
        let (one, other) = text.split_once('\n').unwrap_or((&text, ""));
        let written = |one: &str, other: &str| {
            let mut writer = KeyWriter::new();
            writer
                .arg(format_args!("{one}"))
                .arg(format_args!("{other}"));
            refused_readably(within_bounds(input, || writer.finish()))
        };
        let whole = written(&format!("{one}{other}"), "");
        if let (Some(pair), Some(whole)) = (written(one, other), whole) {
            assert_eq!(pair == whole, other.is_empty(), "{text:?}");
        }
    });
}

#[test]
fn durations_and_identifiers() {
    bolero::check!().for_each(|input: &[u8]| {
        let text = &*String::from_utf8_lossy(input);
        within_bounds(input, || {
            if let Some(duration) = refused_readably(parse_duration(text)) {
                let written = humantime::format_duration(duration).to_string();
                assert_eq!(
                    parse_duration(&written).as_ref(),
                    Ok(&duration),
                    "{written}"
                );
                is_readable(&brief(duration));
                for spec in [LockSpec::lease, LockSpec::wait, LockSpec::min_hold] {
                    refused_readably(spec(LockSpec::exclusive(), duration).check());
                }
            }
            if let Some(id) = refused_readably(text.parse::<HolderId>()) {
                assert_eq!(id.to_string(), text);
            }
            if let Some(id) = ClientId::from_hex(text) {
                assert_eq!(id.to_string(), text);
            }
            if let Some(token) = Token::from_hex(text) {
                assert_eq!(token.to_hex(), text.as_bytes());
            }
            if let Ok(spec) = serde_json::from_str::<LockSpec>(text) {
                let written = serde_json::to_string(&spec).unwrap();
                assert_eq!(serde_json::from_str::<LockSpec>(&written).unwrap(), spec);
            }
            is_readable(&presentable(text));
            assert!(!visible(text).contains(char::is_control));
            assert!(!in_line(text).to_string().contains(char::is_control));
        });
        let store = MemoryStore::new();
        let page = store.list("", Some(Cursor::new(text)));
        page.now_or_never().unwrap().unwrap();
    });
}

/// The refusals that callers of a service read.
#[test]
fn refusals() {
    bolero::check!().for_each(|input: &[u8]| {
        let text = &*String::from_utf8_lossy(input);
        let mut numbers = [0; 12];
        numbers
            .iter_mut()
            .zip(input)
            .for_each(|(to, from)| *to = *from);
        let [a, b, c, d, e, f, g, h, nanos @ ..] = numbers;
        let seconds = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let after = Duration::from_secs(seconds)
            .saturating_add(Duration::from_nanos(u32::from_le_bytes(nanos).into()));
        within_bounds(input, || {
            let problem =
                Problem::new(ErrorClass::Busy, "contended", text).retry_after(Some(after));
            let response: http::Response<String> = problem.into_response();
            let document: serde_json::Value = serde_json::from_str(response.body()).unwrap();
            assert_eq!(document["detail"], text);
            let waited: u64 = response.headers()["retry-after"]
                .to_str()
                .unwrap()
                .parse()
                .unwrap();
            assert!(waited >= after.as_secs());
            retry_info(GrpcCode::Aborted, text, after);
            RequestName::from(text.to_owned()).to_string();
        });
    });
}
