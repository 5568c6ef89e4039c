//! The function below the attribute, and its validation.
//!
//! Only attributes, visibility and signature are parsed. The body stays a token stream, so that
//! unfinished code does not break the attribute. The body of a plain function is parsed, because
//! it may be equivalent to an `async fn`, or the expansion of one by `#[async_trait]`.

use std::collections::HashMap;

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{
    Attribute, Block, Expr, ExprAsync, GenericArgument, Ident, Local, Pat, Path, PathArguments,
    ReturnType, Signature, Stmt, Token, Type, TypeParamBound, Visibility,
    ext::IdentExt as _,
    parse::{Parse, ParseStream, Parser as _},
    spanned::Spanned as _,
    token::Brace,
    visit_mut::{VisitMut, visit_pat_ident_mut},
};

use crate::args::{Args, nearest};

/// A function that can be locked.
pub(crate) struct Function {
    pub(crate) attrs: Vec<Attribute>,
    pub(crate) vis: Visibility,
    pub(crate) sig: Signature,
    pub(crate) brace: Brace,
    pub(crate) inner_attrs: Vec<Attribute>,
    pub(crate) work: Work,
}

/// The code that runs under the lock.
pub(crate) enum Work {
    /// The body of an `async fn`.
    Async(TokenStream),
    /// The body of a function that consists only of `async move { .. }` or
    /// `Box::pin(async move { .. })`.
    Block(Box<AsyncBlock>),
}

pub(crate) struct AsyncBlock {
    /// `Box::pin`.
    pub(crate) pin: Option<Box<Expr>>,
    /// `async move`.
    pub(crate) keywords: TokenStream,
    /// The bindings with which `#[async_trait]` repeats the arguments in the body. Keys may name
    /// them.
    pub(crate) arguments: Vec<Local>,
    pub(crate) brace: Brace,
    pub(crate) body: TokenStream,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        if !begins_a_function(input) {
            return Err(input.error(
                "`#[distributed_lock]` goes on an `async fn`: put it on a function or a method",
            ));
        }
        let sig: Signature = input.parse()?;
        if let Some(constness) = &sig.constness {
            return Err(syn::Error::new(
                constness.span,
                "a `const fn` cannot wait for a lock: make it an `async fn`",
            ));
        }
        if input.peek(Token![;]) {
            return Err(
                input.error("there is no body here to lock: put `#[distributed_lock]` on the method that has it")
            );
        }
        let content;
        let brace = syn::braced!(content in input);
        let inner_attrs = content.call(Attribute::parse_inner)?;
        let body: TokenStream = content.parse()?;
        let work = if sig.asyncness.is_some() {
            Work::Async(body)
        } else {
            // Without a return type, the function only creates a future and drops it.
            let block = async_block(&body).filter(|_| !matches!(sig.output, ReturnType::Default));
            Work::Block(block.ok_or_else(|| not_async(&sig, &body))?.into())
        };
        let function = Self {
            attrs,
            vis,
            sig,
            brace,
            inner_attrs,
            work,
        };
        match function.returns() {
            Some(ty @ Type::Never(_)) => {
                let message = "a function that never returns cannot report that the lock was lost: return a `Result` \
                               with `std::convert::Infallible` in its `Ok`";
                Err(syn::Error::new(ty.span(), message))
            }
            _ => Ok(function),
        }
    }
}

/// Returns whether an `fn` follows, after nothing but `const`, `async`, `unsafe`, `extern "C"`.
fn begins_a_function(input: ParseStream<'_>) -> bool {
    let ahead = input.fork();
    while ahead.peek(Ident::peek_any) || ahead.peek(syn::LitStr) {
        if ahead.peek(Token![fn]) {
            return true;
        }
        if ahead.parse::<TokenTree>().is_err() {
            break;
        }
    }
    false
}

/// Splits `async move { .. }` or `Box::pin(async move { .. })`, if it is the whole body. Code in
/// front of it would run without the lock.
fn async_block(body: &TokenStream) -> Option<AsyncBlock> {
    let mut statements = Block::parse_within.parse2(body.clone()).ok()?;
    let (Some(Stmt::Expr(future, None)), None) = (statements.pop(), statements.pop()) else {
        return None;
    };
    let (pin, block) = match future {
        Expr::Call(mut call) => {
            let Expr::Path(pin) = &*call.func else {
                return None;
            };
            if !ends_with(&pin.path, ["Box", "pin"]) || call.args.len() != 1 {
                return None;
            }
            (Some(call.func), call.args.pop()?)
        }
        block => (None, block),
    };
    let Expr::Async(ExprAsync {
        async_token,
        capture: Some(capture),
        block,
        ..
    }) = block
    else {
        return None;
    };
    let (mut arguments, mut body) = (Vec::new(), TokenStream::new());
    let mut statements = block.stmts.into_iter().peekable();
    // Only at the start: further down, `let total = total;` is the user's code.
    while let Some(statement) = statements.next_if(is_preamble) {
        match statement {
            Stmt::Local(local) if !binds_self(&local) => arguments.push(local),
            statement => statement.to_tokens(&mut body),
        }
    }
    body.extend(statements.map(ToTokens::into_token_stream));
    Some(AsyncBlock {
        pin,
        keywords: quote!(#async_token #capture),
        arguments,
        brace: block.brace_token,
        body,
    })
}

/// Returns whether the path ends in these two segments.
fn ends_with(path: &Path, words: [&str; 2]) -> bool {
    let mut segments = path.segments.iter().rev().map(|segment| &segment.ident);
    let [first, last] = words;
    segments.next().is_some_and(|ident| ident == last)
        && segments.next().is_some_and(|ident| ident == first)
}

/// Returns whether the statement belongs to the preamble that `#[async_trait]` writes:
/// `if let Some(__ret) = ..`, `let __self = self;`, `let id = id;`,
/// `let PATTERN = { let __arg1 = __arg1; __arg1 };`.
fn is_preamble(statement: &Stmt) -> bool {
    let local = match statement {
        Stmt::Local(local) => local,
        Stmt::Expr(Expr::If(anchor), None) => {
            return matches!(&*anchor.cond, Expr::Let(cond) if cond.pat.to_token_stream().to_string().contains("__ret"));
        }
        _ => return false,
    };
    match (&local.pat, local.init.as_ref().map(|init| &*init.expr)) {
        (Pat::Ident(argument), Some(Expr::Path(path))) => {
            path.path.is_ident(&argument.ident) || binds_self(local)
        }
        (_, Some(Expr::Block(init))) => {
            let [Stmt::Local(argument), Stmt::Expr(Expr::Path(path), None)] = &*init.block.stmts
            else {
                return false;
            };
            let Pat::Ident(argument) = &argument.pat else {
                return false;
            };
            path.path.is_ident(&argument.ident) && argument.ident.to_string().starts_with("__arg")
        }
        _ => false,
    }
}

fn binds_self(local: &Local) -> bool {
    matches!(&local.pat, Pat::Ident(name) if name.ident == "__self")
}

/// The error for a function that is not asynchronous.
fn not_async(sig: &Signature, body: &TokenStream) -> syn::Error {
    let name = &sig.ident;
    let message = if body.to_string().contains("block_on") {
        format!(
            "`{name}` is not asynchronous any more: an attribute above, such as `#[tokio::main]` or `#[tokio::test]`, has \
             made it a plain function; put `#[distributed_lock]` above that one"
        )
    } else if returns_a_future(sig) && body.to_string().starts_with("async {") {
        "the lock is taken in this block, which has to own what it uses: write `async move { .. }`"
            .to_owned()
    } else if returns_a_future(sig) {
        format!(
            "`{name}` is not an `async fn`: write `async fn {name}`, or make `async move {{ .. }}` or `Box::pin(async move {{ .. }})` \
             its whole body, so that nothing of it is done without the lock"
        )
    } else {
        format!("waiting for a lock is asynchronous: write `async fn {name}`")
    };
    syn::Error::new(sig.fn_token.span, message)
}

/// Recognizes `Pin<Box<dyn Future<..>>>`, `BoxFuture<..>` and `impl Future<..>` by name. An alias
/// or a path does not change the advice.
fn returns_a_future(sig: &Signature) -> bool {
    sig.output
        .to_token_stream()
        .into_iter()
        .any(|token| contains_future(&token))
}

fn contains_future(token: &TokenTree) -> bool {
    match token {
        TokenTree::Ident(ident) => ident.to_string().ends_with("Future"),
        TokenTree::Group(group) => group
            .stream()
            .into_iter()
            .any(|token| contains_future(&token)),
        _ => false,
    }
}

impl Function {
    /// Returns the type that the caller awaits, if it is written.
    pub(crate) fn returns(&self) -> Option<&Type> {
        let ReturnType::Type(_, ty) = &self.sig.output else {
            return None;
        };
        match self.work {
            Work::Async(_) => Some(ty),
            Work::Block(_) => future_output(ty),
        }
    }

    /// Returns the type that the caller awaits, even behind an alias. `None` if only the compiler
    /// knows it.
    pub(crate) fn output(&self) -> Option<Type> {
        match (self.returns(), &self.sig.output) {
            (Some(ty), _) => Some(ty.clone()),
            (None, ReturnType::Default) => Some(syn::parse_quote!(())),
            (None, ReturnType::Type(_, ty)) => {
                let is_named = matches!(**ty, Type::Path(_));
                is_named.then(|| syn::parse_quote!(<#ty as ::core::future::Future>::Output))
            }
        }
    }

    /// Returns the names that the arguments bind, each once.
    pub(crate) fn arguments(&self) -> Bindings {
        let mut arguments = Bindings::default();
        arguments.visit_signature_mut(&mut self.sig.clone());
        if let Work::Block(block) = &self.work {
            block
                .arguments
                .iter()
                .for_each(|local| arguments.visit_pat_mut(&mut local.pat.clone()));
        }
        arguments
    }

    /// Validates the function against the arguments of the attribute.
    pub(crate) fn check(&self, args: &Args) -> syn::Result<()> {
        let arguments = self.arguments();
        let mistakes = self
            .check_captures(args, &arguments)
            .chain(self.check_room(args))
            .chain(arguments.check_held(args));
        let mistakes = mistakes.reduce(|mut all, one| {
            all.combine(one);
            all
        });
        mistakes.map_or(Ok(()), Err)
    }

    /// Rejects a function that returns nothing, and so cannot return a `LockError`.
    ///
    /// The compiler would reject it as well, like any other type that cannot.
    fn check_room(&self, args: &Args) -> Option<syn::Error> {
        let span = match (&self.sig.output, self.returns()) {
            _ if args.map_err.is_some() => return None,
            (ReturnType::Default, _) => self.sig.ident.span(),
            (_, Some(ty @ Type::Tuple(tuple))) if tuple.elems.is_empty() => ty.span(),
            _ => return None,
        };
        let message = format!(
            "`{}` returns nothing, but must be able to report that the lock was not acquired or was lost: return a \
             `Result<(), LockError>`, or handle the error, `map_err = |error| eprintln!(\"{{error}}\")`",
            self.sig.ident
        );
        Some(syn::Error::new(span, message))
    }

    /// Rejects a key that captures a name which is not an argument.
    ///
    /// The compiler would reject it as well, but it cannot look into a split string: it would
    /// suggest replacing the whole key by the intended variable. A capitalized name may be a
    /// constant, so it is left to the compiler.
    fn check_captures(
        &self,
        args: &Args,
        arguments: &Bindings,
    ) -> impl Iterator<Item = syn::Error> {
        let constants: Vec<_> = self
            .sig
            .generics
            .const_params()
            .map(|param| param.ident.unraw().to_string())
            .collect();
        let missing = args
            .keys
            .each()
            .flat_map(|key| key.captures())
            .filter(move |(name, _)| {
                name.starts_with(|first: char| first.is_lowercase() || first == '_')
                    && !arguments.hidden
                    && !arguments.has(name)
                    && !constants.iter().any(|constant| constant == name)
            });
        missing.map(|(name, span)| {
            let names: Vec<_> = arguments
                .names
                .iter()
                .map(|name| name.unraw().to_string())
                .collect();
            let hint = match nearest(name, names.iter().map(String::as_str)) {
                Some(near) => format!("did you mean `{{{near}}}`?"),
                None => format!(
                    "name one in the key, or give the value after it, `key(\"order:{{}}\", {name})`"
                ),
            };
            syn::Error::new(
                span,
                format!("`{}` has no argument `{name}`: {hint}", self.sig.ident),
            )
        })
    }
}

/// Returns `T` of `Pin<Box<dyn Future<Output = T>>>` or `impl Future<Output = T>`.
fn future_output(ty: &Type) -> Option<&Type> {
    let bounds = match ty {
        Type::ImplTrait(future) => &future.bounds,
        _ => match argument_of(argument_of(ty, "Pin")?, "Box")? {
            Type::TraitObject(future) => &future.bounds,
            _ => return None,
        },
    };
    bounds.iter().find_map(|bound| {
        let TypeParamBound::Trait(bound) = bound else {
            return None;
        };
        let segment = bound
            .path
            .segments
            .last()
            .filter(|segment| segment.ident == "Future")?;
        let PathArguments::AngleBracketed(arguments) = &segment.arguments else {
            return None;
        };
        arguments.args.iter().find_map(|argument| match argument {
            GenericArgument::AssocType(assoc) if assoc.ident == "Output" => Some(&assoc.ty),
            _ => None,
        })
    })
}

/// Returns `T` of `Name<T>`.
fn argument_of<'a>(ty: &'a Type, name: &str) -> Option<&'a Type> {
    let Type::Path(path) = ty else { return None };
    let segment = path
        .path
        .segments
        .last()
        .filter(|segment| segment.ident == name)?;
    let PathArguments::AngleBracketed(arguments) = &segment.arguments else {
        return None;
    };
    arguments.args.iter().find_map(|argument| match argument {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    })
}

/// The names that the arguments of a function bind.
#[derive(Default)]
pub(crate) struct Bindings {
    names: Vec<Ident>,
    /// A pattern contains a macro, which may bind more names.
    hidden: bool,
}

impl Bindings {
    fn has(&self, name: &str) -> bool {
        self.names.iter().any(|other| other.unraw() == name)
    }

    /// Returns the names that occur in `body`, with the span of their first occurrence.
    pub(crate) fn within(self, body: &TokenStream) -> impl Iterator<Item = Ident> {
        let mut words = HashMap::new();
        collect_words(body.clone(), &mut words);
        self.names.into_iter().filter_map(move |mut name| {
            let place = words.remove(&name.to_string())?;
            name.set_span(name.span().located_at(place));
            Some(name)
        })
    }

    fn check_held(&self, args: &Args) -> Option<syn::Error> {
        let held = args
            .held
            .as_ref()
            .filter(|held| self.has(&held.unraw().to_string()))?;
        let message = format!("`held = {held}` hides the argument `{held}`: take another name");
        Some(syn::Error::new(held.span(), message))
    }
}

impl VisitMut for Bindings {
    fn visit_pat_ident_mut(&mut self, pat: &mut syn::PatIdent) {
        self.names.push(pat.ident.clone());
        visit_pat_ident_mut(self, pat);
    }

    fn visit_receiver_mut(&mut self, receiver: &mut syn::Receiver) {
        self.names.push(Ident::from(receiver.self_token));
    }

    fn visit_macro_mut(&mut self, _: &mut syn::Macro) {
        self.hidden = true;
    }
}

/// Collects the identifiers of a token stream, each with its first span.
fn collect_words(tokens: TokenStream, words: &mut HashMap<String, Span>) {
    for token in tokens {
        match token {
            TokenTree::Ident(word) => {
                _ = words.entry(word.to_string()).or_insert_with(|| word.span())
            }
            TokenTree::Group(group) => collect_words(group.stream(), words),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}
