//! Parsers of single values. Their errors describe the correct form.

use std::{ops::RangeInclusive, time::Duration};

use lock_runtime::LockSpec;
use toml::{
    Spanned,
    de::{DeInteger, DeTable, DeValue},
};

use super::Reader;
use crate::policies::settings::Said;

pub(super) type Value<'t> = Spanned<DeValue<'t>>;

impl Reader<'_> {
    pub(super) fn unknown<'n>(
        &mut self,
        what: &str,
        name: &Spanned<impl AsRef<str>>,
        known: impl IntoIterator<Item = &'n str>,
        aliases: &[(&str, &'n str)],
    ) -> Option<&'n str> {
        let text = name.get_ref().as_ref();
        let known: Vec<_> = known.into_iter().collect();
        let alias = aliases
            .iter()
            .find(|(alias, _)| *alias == text)
            .map(|(_, known)| *known);
        let meant = alias.or_else(|| nearest(text, known.iter().copied()));
        let advice = match meant {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("expected one of {}", known.join(", ")),
        };
        self.mistakes.add(
            name.span().start,
            format!("unknown {what} `{}`: {advice}", text.escape_debug()),
        );
        meant
    }

    pub(super) fn table<'v, 'd>(
        &mut self,
        name: &str,
        value: &'v Value<'d>,
    ) -> Option<&'v DeTable<'d>> {
        let table = value.get_ref().as_table();
        if table.is_none() {
            let advice = match (name, value.get_ref()) {
                ("routes" | "groups", _) => format!(": write [{name}.\"..\"] for each"),
                (_, DeValue::Array(_)) => ": write [..] for [[..]]".to_owned(),
                ("status", _) => ": write status = { busy = 423 }".to_owned(),
                _ => ": write { key = \"order:{id}\" }".to_owned(),
            };
            self.mistakes.add(
                at(value),
                format!("{name} is a table, not {}{advice}", kind(value)),
            );
        }
        table
    }

    pub(super) fn text<'d>(
        &mut self,
        name: &str,
        example: &str,
        value: &'d Value<'_>,
    ) -> Option<Said<&'d str>> {
        let text = value.get_ref().as_str();
        if text.is_none() {
            self.mistakes.add(
                at(value),
                format!(
                    "expected a string, found {}: write {name} = {example}",
                    kind(value)
                ),
            );
        }
        text.map(|text| Said {
            at: at(value),
            value: text,
        })
    }

    pub(super) fn flag(&mut self, name: &str, value: &Value<'_>) -> Option<bool> {
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            let message = format!(
                "expected true or false, found {}: write {name} = true",
                kind(value)
            );
            self.mistakes.add(at(value), message);
        }
        flag
    }

    pub(super) fn number(
        &mut self,
        name: &str,
        range: RangeInclusive<u64>,
        example: &str,
        value: &Value<'_>,
    ) -> Option<u64> {
        let number = value.get_ref().as_integer();
        let number = number
            .map(|number: &DeInteger<'_>| u64::from_str_radix(number.as_str(), number.radix()));
        match number {
            Some(Ok(number)) if range.contains(&number) => return Some(number),
            Some(_) => {
                let (first, last) = range.into_inner();
                let message = format!(
                    "`{name}` is out of range ({first} to {last}): write {name} = {example}"
                );
                self.mistakes.add(at(value), message);
            }
            None => {
                let message = format!(
                    "expected a whole number, found {}: write {name} = {example}",
                    kind(value)
                );
                self.mistakes.add(at(value), message);
            }
        }
        None
    }

    pub(super) fn word<T: Copy, const N: usize>(
        &mut self,
        name: &str,
        value: &Value<'_>,
        words: [(&str, T); N],
    ) -> Option<T> {
        let said = self.text(name, &format!("{:?}", words[0].0), value)?;
        let found = words.iter().find(|(word, _)| *word == said.value);
        if found.is_none() {
            let words = words.map(|(word, _)| format!("{word:?}"));
            self.mistakes.add(
                said.at,
                format!(
                    "`{name}` must be {}, not {:?}",
                    words.join(" or "),
                    said.value
                ),
            );
        }
        found.map(|(_, meaning)| *meaning)
    }

    /// Parses a duration. `spec` builds the lock options that must be valid with it.
    pub(super) fn duration(
        &mut self,
        name: &str,
        value: &Value<'_>,
        spec: impl Fn(Duration) -> LockSpec,
    ) -> Option<Duration> {
        let seconds = value.get_ref().as_integer().map_or("2", DeInteger::as_str);
        let said = self.text(name, &format!("\"{seconds}s\""), value)?;
        let duration = match humantime::parse_duration(said.value) {
            Ok(duration) => duration,
            Err(error) => {
                let bare =
                    !said.value.is_empty() && said.value.bytes().all(|byte| byte.is_ascii_digit());
                let seconds = if bare { said.value } else { "2" };
                let message = format!(
                    "{:?} is not a duration ({error}): write {name} = \"{seconds}s\", \"500ms\" or the like",
                    said.value
                );
                self.mistakes.add(said.at, message);
                return None;
            }
        };
        match spec(duration).check() {
            Ok(()) => Some(duration),
            Err(error) => {
                self.mistakes.add(said.at, error.to_string());
                None
            }
        }
    }
}

#[cfg(feature = "once")]
impl Reader<'_> {
    /// Parses a number of bytes: `"64KiB"`, `"1MiB"` or `"500B"`.
    pub(super) fn size(&mut self, name: &str, example: &str, value: &Value<'_>) -> Option<usize> {
        let said = self.text(name, &format!("{example:?}"), value)?;
        let digits = said.value.trim_end_matches(|it: char| !it.is_ascii_digit());
        let unit = match said.value[digits.len()..].trim_start() {
            "B" => Some(1),
            "KiB" => Some(1024),
            "MiB" => Some(1024 * 1024),
            _ => None,
        };
        let number = digits.parse::<usize>().ok();
        let size = number
            .zip(unit)
            .and_then(|(number, unit)| number.checked_mul(unit));
        if size.is_none() {
            let message = format!(
                "{:?} is not a number of bytes: write {name} = {example:?}, with B, KiB or MiB",
                said.value
            );
            self.mistakes.add(said.at, message);
        }
        size
    }
}

/// Returns the offset of a value.
pub(super) fn at(value: &Value<'_>) -> usize {
    value.span().start
}

pub(super) fn kind(value: &Value<'_>) -> &'static str {
    match value.get_ref() {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "an array",
        DeValue::Table(_) => "a table",
    }
}

/// The longest text that may be meant for a name: the comparison takes memory for each pair of
/// characters.
const LONGEST_MEANT: usize = 128;

/// Returns the name that was probably meant.
pub(super) fn nearest<'n>(text: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let is_short = |name: &&str| text.len().max(name.len()) <= LONGEST_MEANT;
    let near = names
        .into_iter()
        .filter(is_short)
        .map(|name| (strsim::damerau_levenshtein(text, name), name));
    near.filter(|(distance, name)| *distance <= (name.len() / 3).max(1))
        .min()
        .map(|(_, name)| name)
}
