//! The arguments of the attribute: what may be written, and what to write instead.
//!
//! Mistakes are gathered, so that one build shows all of them, each at its own token.

use std::{num::NonZeroU32, time::Duration};

use proc_macro2::Span;
use syn::{
    Expr, ExprLit, Ident, Lit, Token,
    ext::IdentExt as _,
    parse::{Parse, ParseStream},
};

use crate::key::Key;

/// The shortest and the longest lease; the runtime's `MIN_LEASE` and `MAX_LEASE`.
const MIN_LEASE: Duration = Duration::from_millis(100);
const MAX_LEASE: Duration = Duration::from_secs(24 * 60 * 60);
const MAX_MAX_HOLD: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Every argument, in the order of the documentation.
const KNOWN: [&str; 11] =
    ["key", "lease", "wait", "no_wait", "reentrant", "read", "write", "permits", "min_hold", "max_hold", "client"];

/// What other libraries call it.
const ALIASES: [(&str, &str); 12] = [
    ("name", "key"),
    ("id", "key"),
    ("ttl", "lease"),
    ("expiry", "lease"),
    ("timeout", "wait"),
    ("acquire_timeout", "wait"),
    ("try_lock", "no_wait"),
    ("shared", "read"),
    ("exclusive", "write"),
    ("semaphore", "permits"),
    ("lock_at_most_for", "max_hold"),
    ("lock_at_least_for", "min_hold"),
];

/// The arguments, checked.
pub(crate) struct Args {
    pub(crate) key: Key,
    /// The client to lock with; the ambient one if not given.
    pub(crate) client: Option<Expr>,
    pub(crate) mode: Mode,
    pub(crate) lease: Option<Value<Duration>>,
    pub(crate) wait: Option<Wait>,
    pub(crate) min_hold: Option<Value<Duration>>,
    pub(crate) max_hold: Option<Value<Duration>>,
    pub(crate) reentrant: bool,
}

/// A value that is known while compiling, or one that is not.
pub(crate) enum Value<T> {
    Literal(T),
    Expr(Expr),
}

pub(crate) enum Mode {
    Exclusive,
    Shared,
    Permits(Value<NonZeroU32>),
}

pub(crate) enum Wait {
    No,
    AtMost(Value<Duration>),
}

impl Parse for Args {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut draft = Draft::default();
        while !input.is_empty() {
            if let Err(error) = draft.argument(input) {
                draft.refuse(error);
                skip_to_comma(input)?;
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        draft.finish()
    }
}

/// The literal that an expression is, also when a `macro_rules!` passed it on.
pub(crate) fn literal(expr: &Expr) -> Option<&Lit> {
    match expr {
        Expr::Lit(ExprLit { lit, .. }) => Some(lit),
        Expr::Group(group) => literal(&group.expr),
        _ => None,
    }
}

/// Names of the expansion's own, shown to the user at `span`.
pub(crate) fn located_at(span: Span) -> Span {
    Span::mixed_site().located_at(span)
}

/// What was read so far.
#[derive(Default)]
struct Draft {
    /// Every argument that was begun, right or wrong.
    seen: Vec<Ident>,
    /// A key was begun, if only its name was missing: "a lock needs a key" would mislead.
    key_begun: bool,
    error: Option<syn::Error>,
    key: Option<Key>,
    client: Option<Expr>,
    mode: Option<(Ident, Mode)>,
    lease: Option<Value<Duration>>,
    wait: Option<(Ident, Wait)>,
    min_hold: Option<Value<Duration>>,
    max_hold: Option<Value<Duration>>,
    reentrant: bool,
}

impl Draft {
    fn refuse(&mut self, error: syn::Error) {
        match &mut self.error {
            Some(first) => first.combine(error),
            None => self.error = Some(error),
        }
    }

    /// Reads one argument, up to its comma.
    fn argument(&mut self, input: ParseStream<'_>) -> syn::Result<()> {
        if !input.peek(Ident::peek_any) {
            self.key_begun |= input.peek(syn::LitStr);
            return Err(unnamed(input));
        }
        let name = input.call(Ident::parse_any)?;
        if self.seen.contains(&name) {
            return Err(syn::Error::new(name.span(), format!("`{name}` is given twice: keep one")));
        }
        self.seen.push(name.clone());
        match name.to_string().as_str() {
            "key" => {
                self.key_begun = true;
                self.key = Some(key(&name, input)?);
            }
            "client" => self.client = Some(value(&name, "client = self.locks", input)?),
            "lease" => self.lease = Some(duration(&name, input)?),
            "min_hold" => self.min_hold = Some(duration(&name, input)?),
            "max_hold" => self.max_hold = Some(duration(&name, input)?),
            "reentrant" => {
                flag(&name, input)?;
                self.reentrant = true;
            }
            "read" => {
                flag(&name, input)?;
                self.set_mode(name, Mode::Shared)?;
            }
            "write" => {
                flag(&name, input)?;
                self.set_mode(name, Mode::Exclusive)?;
            }
            "permits" => {
                let permits = permits(&name, input)?;
                self.set_mode(name, Mode::Permits(permits))?;
            }
            "wait" => {
                let wait = duration(&name, input)?;
                self.set_wait(name, Wait::AtMost(wait))?;
            }
            "no_wait" => {
                flag(&name, input)?;
                self.set_wait(name, Wait::No)?;
            }
            _ => return Err(unknown(&name)),
        }
        Ok(())
    }

    fn set_mode(&mut self, name: Ident, mode: Mode) -> syn::Result<()> {
        if let Some((other, _)) = &self.mode {
            let message = format!(
                "`{other}` and `{name}` exclude each other: keep `read` for one of many readers, `write` for the only \
                 writer, or `permits = n` for at most n holders"
            );
            return Err(syn::Error::new(name.span(), message));
        }
        self.mode = Some((name, mode));
        Ok(())
    }

    fn set_wait(&mut self, name: Ident, wait: Wait) -> syn::Result<()> {
        if self.wait.is_some() {
            let message = "`wait` and `no_wait` exclude each other: keep `wait = \"2s\"` to wait at most so long, or \
                           `no_wait` to give up at once";
            return Err(syn::Error::new(name.span(), message));
        }
        self.wait = Some((name, wait));
        Ok(())
    }

    fn finish(mut self) -> syn::Result<Args> {
        if let (Some(Value::Literal(min)), Some(Value::Literal(max))) = (&self.min_hold, &self.max_hold)
            && min > max
        {
            let message = format!(
                "`min_hold` ({}) is longer than `max_hold` ({}): swap them, or leave one out",
                humantime::format_duration(*min),
                humantime::format_duration(*max)
            );
            let later = self.seen.iter().rfind(|name| *name == "min_hold" || *name == "max_hold");
            let span = later.map_or_else(Span::call_site, Ident::span);
            self.refuse(syn::Error::new(span, message));
        }
        if !self.key_begun {
            self.refuse(missing_key());
        }
        match (self.error, self.key) {
            (None, Some(key)) => Ok(Args {
                key,
                client: self.client,
                mode: self.mode.map_or(Mode::Exclusive, |(_, mode)| mode),
                lease: self.lease,
                wait: self.wait.map(|(_, wait)| wait),
                min_hold: self.min_hold,
                max_hold: self.max_hold,
                reentrant: self.reentrant,
            }),
            (error, _) => Err(error.unwrap_or_else(missing_key)),
        }
    }
}

fn missing_key() -> syn::Error {
    let message = "a lock needs a key: write `key = \"order:{id}\"`, or with a value that is no variable `key(\"order:{}\", order.id)`";
    syn::Error::new(Span::call_site(), message)
}

/// `key = ..` or `key(..)`.
fn key(name: &Ident, input: ParseStream<'_>) -> syn::Result<Key> {
    if input.peek(syn::token::Paren) {
        let content;
        syn::parenthesized!(content in input);
        return Key::from_call(&content);
    }
    Key::from_value(value(name, "key = \"order:{id}\"", input)?)
}

/// `= expr`; `example` shows the whole argument.
fn value(name: &Ident, example: &str, input: ParseStream<'_>) -> syn::Result<Expr> {
    let missing = || syn::Error::new(name.span(), format!("`{name}` needs a value: write `{example}`"));
    if !input.peek(Token![=]) {
        return Err(missing());
    }
    input.parse::<Token![=]>()?;
    if input.is_empty() || input.peek(Token![,]) {
        return Err(missing());
    }
    input.parse()
}

fn flag(name: &Ident, input: ParseStream<'_>) -> syn::Result<()> {
    if input.is_empty() || input.peek(Token![,]) {
        return Ok(());
    }
    Err(input.error(format!("`{name}` takes no value: write `{name}` alone, or leave it out")))
}

fn duration(name: &Ident, input: ParseStream<'_>) -> syn::Result<Value<Duration>> {
    let value = value(name, &format!("{name} = \"30s\""), input)?;
    let text = match literal(&value) {
        None => return Ok(Value::Expr(value)),
        Some(Lit::Str(text)) => text,
        Some(other) => {
            let message = format!(
                "a duration is a string with a unit, or an expression of type `Duration`: write `{name} = \"30s\"`"
            );
            return Err(syn::Error::new_spanned(other, message));
        }
    };
    let source = text.value();
    let complaint = match humantime::parse_duration(&source) {
        Ok(duration) => match out_of_range(name, duration) {
            None => return Ok(Value::Literal(duration)),
            Some(complaint) => complaint,
        },
        Err(error) => {
            format!("{source:?} is not a duration ({error}): write a number and a unit, such as \"30s\" or \"1m 30s\"")
        }
    };
    Err(syn::Error::new(text.span(), complaint))
}

fn out_of_range(name: &Ident, duration: Duration) -> Option<String> {
    if name == "lease" && !(MIN_LEASE..=MAX_LEASE).contains(&duration) {
        return Some(
            "a lease is 100ms to 24h: it says how fast a crash is noticed, and is renewed while the body runs".into(),
        );
    }
    if name == "max_hold" {
        if duration > MAX_MAX_HOLD {
            return Some("a `max_hold` is at most 365days: write less, or leave it out for no limit".into());
        }
        return duration.is_zero().then(|| "a `max_hold` of zero holds nothing: leave it out for no limit".into());
    }
    (duration > MAX_LEASE).then(|| format!("a `{name}` is at most 24h: write less"))
}

fn permits(name: &Ident, input: ParseStream<'_>) -> syn::Result<Value<NonZeroU32>> {
    let value = value(name, "permits = 3", input)?;
    match literal(&value) {
        None => Ok(Value::Expr(value)),
        Some(Lit::Int(number)) => match number.base10_parse().map(NonZeroU32::new) {
            Ok(Some(permits)) => Ok(Value::Literal(permits)),
            Ok(None) => Err(syn::Error::new(number.span(), "no permits let nobody in: write 1 or more")),
            Err(_) => Err(syn::Error::new(number.span(), "too many permits: write at most 4294967295")),
        },
        Some(other) => Err(syn::Error::new_spanned(
            other,
            "permits are a number, or an expression of type `NonZeroU32`: write `permits = 3`",
        )),
    }
}

/// What does not begin with a name; mostly a key that was written as in other libraries.
fn unnamed(input: ParseStream<'_>) -> syn::Error {
    match input.parse::<Lit>() {
        Ok(Lit::Str(text)) => {
            syn::Error::new(text.span(), format!("every argument has a name: write `key = {:?}`", text.value()))
        }
        _ => input.error("expected an argument such as `key = \"order:{id}\"`"),
    }
}

fn unknown(name: &Ident) -> syn::Error {
    let text = name.to_string();
    let alias = ALIASES.iter().find(|(alias, _)| *alias == text).map(|(_, known)| *known);
    let near = alias.or_else(|| nearest(&text, KNOWN));
    let hint = near.map(|known| format!(", did you mean `{known}`?")).unwrap_or_default();
    syn::Error::new(name.span(), format!("unknown argument `{text}`{hint}; the arguments are: {}", KNOWN.join(", ")))
}

/// The word that was probably meant.
pub(crate) fn nearest<'a>(word: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let (distance, near) = words.into_iter().map(|other| (distance(word, other), other)).min()?;
    // Half of the letters wrong is another word.
    (distance * 2 < word.len()).then_some(near)
}

/// Letters to insert, remove or replace to get from one word to the other.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[row.len() - 1]
}

fn skip_to_comma(input: ParseStream<'_>) -> syn::Result<()> {
    while !input.is_empty() && !input.peek(Token![,]) {
        input.parse::<proc_macro2::TokenTree>()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
