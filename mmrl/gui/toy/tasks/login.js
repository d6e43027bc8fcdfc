({
  init: config => ({ user: '', word: '', remember: false, role: config.roles[0], submitted: false, opened: '' }),
  view: (state, kit, config) => state.submitted
    ? [kit.text(`Welcome, ${state.user}.`)]
    : [kit.bar(kit.input('user', 'User name', state, 'user')), kit.bar(kit.input('word', 'Password', state, 'word')),
      kit.bar(kit.select('role', 'Role', config.roles, state.role, value => { state.role = value; })),
      kit.bar(kit.tick('remember', 'Remember me', state.remember, value => { state.remember = value; })),
      kit.bar(kit.button('submit', 'Log in', kit.go(() => { state.submitted = true; }), { class: 'main' }),
        config.others.map((name, place) => kit.button(`other${place}`, name, kit.set(() => { state.opened = name; })))),
      state.opened ? kit.text(`${state.opened} is not available now.`, 'note') : null],
  goals: (state, config) => [state.submitted && state.user === config.user && state.word === config.word,
    ...(config.ask_remember ? [state.remember] : []), ...(config.ask_role ? [state.role === config.role] : []),
    (config.ask_remember || !state.remember) && (config.ask_role || state.role === config.roles[0])],
})
