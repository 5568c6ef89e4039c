//! Texts for operators, on terminals and on pages.

use std::{borrow::Cow, fmt, time::Duration};

/// The longest message of an error, in bytes.
const LONGEST_MESSAGE: usize = 8000;

/// Escapes control characters and those that are invisible or change the direction of the text:
/// names come from other programs.
pub fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    text.chars().for_each(|c| push_visible(c, &mut shown));
    shown
}

/// The message of an error, as [`visible`] shows it and of bounded length: it may repeat what
/// another program has sent.
pub fn message<'a>(text: impl Into<Cow<'a, str>>) -> Cow<'a, str> {
    let text = text.into();
    if text.len() <= LONGEST_MESSAGE && !text.contains(is_hidden) {
        return text;
    }
    let mut shown = String::new();
    for c in text.chars() {
        if shown.len() > LONGEST_MESSAGE {
            shown += "..";
            break;
        }
        push_visible(c, &mut shown);
    }
    shown.into()
}

fn is_hidden(c: char) -> bool {
    // `Default_Ignorable_Code_Point` of Unicode, the directions and separators, and blanks.
    let is_invisible = matches!(c, '\u{a0}' | '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}'
        | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}');
    c.is_control() || is_invisible
}

pub(crate) fn push_visible(c: char, shown: &mut String) {
    match is_hidden(c) {
        true => shown.extend(c.escape_unicode()),
        false => shown.push(c),
    }
}

/// A name from outside in a line of a log or in a message.
///
/// It is as [`visible`] shows it, and quoted where it could be taken for several fields.
pub fn in_line(name: &str) -> InLine<'_> {
    InLine(name)
}

/// See [`in_line`].
#[derive(Clone, Copy, Debug)]
pub struct InLine<'a>(&'a str);

impl fmt::Display for InLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(name) = self;
        let is_plain = |c: char| !c.is_whitespace() && !matches!(c, '=' | '"' | '\\');
        match name.chars().all(is_plain) {
            true => f.write_str(&visible(name)),
            false => {
                let name = name.replace('\\', r"\\").replace('"', "\\\"");
                write!(f, "\"{}\"", visible(&name))
            }
        }
    }
}

/// A duration of a setting, printed exactly in the largest unit that divides it, such as `90h` or
/// `500ms`.
pub(crate) struct Short(pub(crate) Duration);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            _ if self.0.subsec_nanos() > 0 => write!(f, "{:?}", self.0),
            seconds @ 1.. if seconds.is_multiple_of(3600) => write!(f, "{}h", seconds / 3600),
            seconds @ 1.. if seconds.is_multiple_of(60) => write!(f, "{}m", seconds / 60),
            seconds => write!(f, "{seconds}s"),
        }
    }
}

/// Prints a measured duration: to a tenth of a second below ten, and else to a second, such as
/// `1.5s` or `2m 5s`.
pub fn brief(duration: Duration) -> String {
    match duration.as_secs() {
        0..10 => format!("{:.1}s", duration.as_secs_f64()),
        seconds => humantime::format_duration(Duration::from_secs(seconds)).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_printed_exactly() {
        for (duration, text) in [
            (Duration::ZERO, "0s"),
            (Duration::from_millis(99), "99ms"),
            (Duration::from_millis(1500), "1.5s"),
            (Duration::from_secs(61), "61s"),
            (Duration::from_secs(90 * 60), "90m"),
            (Duration::from_secs(10_800_000), "3000h"),
        ] {
            assert_eq!(Short(duration).to_string(), text);
        }
    }

    #[test]
    fn a_message_is_bounded_and_visible() {
        assert!(matches!(message("as it is"), Cow::Borrowed("as it is")));
        assert_eq!(message("a\u{1b}[2J\n\u{202e}"), r"a\u{1b}[2J\u{a}\u{202e}");
        for long in ["x".repeat(100_000), "\u{7}".repeat(100_000)] {
            let shown = message(&long);
            assert!(shown.len() < LONGEST_MESSAGE + 20 && shown.ends_with(".."));
        }
    }

    #[test]
    fn a_name_in_a_line_is_one_field() {
        for (name, shown) in [
            ("order:42", "order:42"),
            ("größe", "größe"),
            ("a\u{202e}b\u{200b}c", r"a\u{202e}b\u{200b}c"),
            ("a\u{3164}\u{e0041}", r"a\u{3164}\u{e0041}"),
            ("1\u{34f}\u{17b4}\u{180b}", r"1\u{34f}\u{17b4}\u{180b}"),
            ("1\u{fe0f}\u{1d173}\u{2800}", r"1\u{fe0f}\u{1d173}\u{2800}"),
            ("x fence=1", "\"x fence=1\""),
            ("x=1", "\"x=1\""),
            ("a\" fence=\"1", "\"a\\\" fence=\\\"1\""),
            ("a\\", "\"a\\\\\""),
            ("line\nline", r#""line\u{a}line""#),
        ] {
            assert_eq!(in_line(name).to_string(), shown);
        }
    }
}
